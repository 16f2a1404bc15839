"""Requests that a pipeline decodes before it serves, so that no user waits for the first pass of a kind, in which
memory is touched for the first time and libraries make kernels for its shape.

The tiers' numbers of CPU threads are chosen while long requests are decoded: the target's during plain decoding,
because nearly all drafts of the warm-up text are accepted; then those of the drafting tiers, while all tiers work.
"""

import time
from collections.abc import Collection, Iterator, Mapping

from triforce_core.config import Settings
from triforce_core.engine.limits import Limits
from triforce_core.engine.sequence import Request
from triforce_core.engine.thread_search import Arrangement, ThreadSearch
from triforce_core.messages import GREEDY, SamplingParams, Tier

SHORT_PROMPT, LONG_PROMPT = 64, 8192  # tokens
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95)
FEW_OUTPUT_TOKENS = 24  # output tokens
MOST_OUTPUT = 4096  # most output tokens of a long request; its search for threads ends with it
PLAIN = (0, 0)  # lookaheads without drafts
TARGET = Tier.TARGET.name.lower()
PERIOD = 61  # tokens after which a prompt repeats itself: so does the output, which makes rounds comparable
PATIENCE_S = 5.0  # longest prefill: prompts are shortened accordingly
SEARCH_S = 10.0  # longest search for threads in one request


class WarmUp:
    """Yields the requests to decode one after another, and decides after each round whether to go on."""

    def __init__(self, settings: Settings, limits: Limits, most_threads: Mapping[str, int]) -> None:
        """`most_threads`: by tier, the most threads to try. For tiers that it does not name, no number is searched."""
        self.settings, self.limits = settings, limits
        self.search = ThreadSearch(most_threads, ())
        self.enough = 0  # output tokens after which the present request may end
        self.prompt_tokens, self.num_committed = 0, 0
        self.prefill_rate = float("inf")  # prompt tokens per second, as measured by the last prefill
        self.moment = 0.0  # when the last round ended
        self.give_up = float("inf")  # when the search ends, finished or not

    def requests(self) -> Iterator[Request]:
        """Two requests with a short prompt, one with a whole prefill chunk, and one with a long context, decoded long
        enough for two snapshots, the second of which is sent as changes. The second is decoded plainly, the third
        without the retrieval tier. Where the target's threads are searched, another long request is decoded plainly
        before the last.
        """
        given = self.settings.speculation
        # Requests may ask for drafts even if the settings do not, unless the target is lossy.
        asked = any(given.effective) or self.settings.target.lossy
        whole = given.effective if asked else given.lookaheads
        drafting = [tier for tier in self.search.best if tier != TARGET]
        stages: list[tuple[int, int, tuple[int, int], Collection[str]]] = [
            (SHORT_PROMPT, FEW_OUTPUT_TOKENS, whole, ()),
            (SHORT_PROMPT, FEW_OUTPUT_TOKENS, PLAIN, ()),  # again, for the prefill rate of a warm pipeline
            (self.settings.target.prefill_chunk, FEW_OUTPUT_TOKENS, (0, whole[1]), ()),
            (LONG_PROMPT, FEW_OUTPUT_TOKENS, PLAIN, (TARGET,)),
            (LONG_PROMPT, 2 * self.settings.retrieval.refresh_every + 1, whole, drafting),
        ]
        if TARGET not in self.search.best:
            del stages[3]
        for index, (prompt_tokens, enough, lookaheads, tiers) in enumerate(stages):
            self.search = ThreadSearch(self.search.best, tiers)
            self.enough, self.num_committed, self.moment = enough, 0, time.perf_counter()
            sampling, most = (SAMPLED, enough) if index < 3 else (GREEDY, MOST_OUTPUT)
            request = self._request(index, prompt_tokens, most, sampling, lookaheads)
            self.prompt_tokens = len(request.prompt)
            yield request

    def _request(
        self, index: int, prompt_tokens: int, max_tokens: int, sampling: SamplingParams, lookaheads: tuple[int, int]
    ) -> Request:
        """A request of at most these sizes, whose prompt begins unlike the others, so that no KV of it is found."""
        room = min(self.limits.context_length, self.limits.kv_pool_tokens)
        prompt_tokens = max(1, int(min(prompt_tokens, PATIENCE_S * self.prefill_rate, room // 2)))
        prompt = tuple((1 + index + 7919 * (i % PERIOD)) % self.limits.vocab_size for i in range(prompt_tokens))
        return Request(prompt, min(max_tokens, room - prompt_tokens), sampling, 0, lookaheads)

    def round_ended(self, num_tokens: int) -> bool:
        """Record the end of a round (the first one includes the prefill); returns whether the request should go on."""
        before, self.moment = self.moment, time.perf_counter()
        if self.num_committed == 0:
            self.prefill_rate = self.prompt_tokens / (self.moment - before)
            self.give_up = self.moment + SEARCH_S
        else:
            self.search.took(self.moment - before, num_tokens)
        self.num_committed += num_tokens
        searching = not self.search.done and self.moment < self.give_up
        return self.num_committed < self.enough or searching

    @property
    def threads(self) -> Arrangement:
        """The threads for the next round. The result of the search is `search.best`."""
        return self.search.arrangement
