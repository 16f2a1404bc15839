"""What a pipeline decodes before it serves: passes of every kind, so that no user's request is the first of its kind.

The first pass of a kind is slow: memory is touched for the first time, and libraries make kernels for its shape. While
the last request is decoded, a long one, the tiers' CPU threads are chosen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from triforce_core.config import Settings
from triforce_core.engine.limits import Limits
from triforce_core.engine.sequence import Request
from triforce_core.engine.thread_search import Arrangement, ThreadSearch
from triforce_core.messages import GREEDY, SamplingParams

SHORT_PROMPT, LONG_PROMPT = 64, 8192  # tokens
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95)
FEW_OUTPUT_TOKENS = 24  # output tokens
MOST_OUTPUT = 4096  # tokens; the choice of threads ends with them
PERIOD = 61  # tokens after which a prompt repeats itself, which makes the output repeat itself, and rounds alike
PATIENCE_S = 5.0  # prompts are shortened so that a prefill takes no longer
SEARCH_S = 20.0  # what choosing threads may take


class WarmUp:
    """The requests to decode, one after another, and what to do after each of their rounds."""

    def __init__(self, settings: Settings, limits: Limits, most_threads: Mapping[str, int]) -> None:
        """`most_threads`: those that there are for each tier; none for a tier whose threads are known."""
        self.settings, self.limits = settings, limits
        self.search = ThreadSearch(most_threads)
        self.long = False  # the last request is being decoded
        self.enough = 0  # output tokens of the request that is being decoded
        self.prompt_tokens, self.num_committed = 0, 0
        self.prefill_rate = float("inf")  # tokens a second, as far as is known
        self.moment = 0.0  # when the last round ended
        self.give_up = float("inf")  # when the search is ended, done or not

    def requests(self) -> Iterator[Request]:
        """Of a short prompt, of a whole chunk, and of a long context with two snapshots, the second cut as changes."""
        plan = (
            (SHORT_PROMPT, FEW_OUTPUT_TOKENS),
            (SHORT_PROMPT, FEW_OUTPUT_TOKENS),  # once more, for the rate at which prompts are read when all is warm
            (self.settings.target.prefill_chunk, FEW_OUTPUT_TOKENS),
            (LONG_PROMPT, 2 * self.settings.retrieval.refresh_every + 1),
        )
        for index, (prompt_tokens, enough) in enumerate(plan):
            self.enough, self.long = enough, index == len(plan) - 1
            self.num_committed, self.moment = 0, time.perf_counter()
            sampling = GREEDY if self.long else SAMPLED
            request = self._request(prompt_tokens, MOST_OUTPUT if self.long else self.enough, sampling)
            self.prompt_tokens = len(request.prompt)
            yield request

    def _request(self, prompt_tokens: int, max_tokens: int, sampling: SamplingParams) -> Request:
        """As near to these sizes as patience and the pipeline allow; all tiers take part."""
        room = min(self.limits.context_length, self.limits.kv_pool_tokens)
        prompt_tokens = max(1, int(min(prompt_tokens, PATIENCE_S * self.prefill_rate, room // 2)))
        prompt = tuple((1 + 7919 * (i % PERIOD)) % self.limits.vocab_size for i in range(prompt_tokens))
        given = self.settings.speculation
        lookaheads = given.effective if any(given.effective) else given.lookaheads
        return Request(prompt, min(max_tokens, room - prompt_tokens), sampling, 0, lookaheads)

    def round_ended(self, num_tokens: int) -> bool:
        """A round has ended, the first of a request with its prefill: whether the request is still of use."""
        before, self.moment = self.moment, time.perf_counter()
        if self.num_committed == 0:
            self.prefill_rate = self.prompt_tokens / (self.moment - before)
            self.give_up = self.moment + SEARCH_S
        elif self.long:
            self.search.took(self.moment - before, num_tokens)
        self.num_committed += num_tokens
        searching = self.long and not self.search.done and self.moment < self.give_up
        return self.num_committed < self.enough or searching

    @property
    def threads(self) -> Arrangement:
        """What to run the next round with. What was found is `search.best`."""
        return self.search.arrangement if self.long else self.search.best
