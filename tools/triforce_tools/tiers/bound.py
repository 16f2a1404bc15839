"""The most tokens per second that any schedule of given stages could reach; docs/operations.md has the formula."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rounds:
    """The mean times of one block on its way through the tiers, in seconds."""

    tokens: float  # E2: tokens that a target pass commits per request
    inner: float  # n: rounds of the retrieval tier per block
    acceptance: float  # α2: chance that the target accepts a token
    draft: float  # time of the draft tier per inner round
    retrieval: float  # time of the retrieval tier per inner round
    shared: float  # core time of both per inner round, if they share a core
    target: float  # t3: time of a target pass
    batches: tuple[float, float, float]  # the mean batch of each tier's passes, draft first

    @property
    def drafting(self) -> float:
        """D: the time until a block is ready."""
        return self.inner * (self.draft + self.retrieval)

    @property
    def latency(self) -> float:
        """L: the time until a block is drafted and verified."""
        return self.drafting + self.target

    def bound(self, requests: int, shared: bool) -> float:
        """The bound E2·min(requests/L, min over stages of b/d) in tokens/s: no schedule of these stages is faster.

        b is the mean batch of a stage and d its time per block. With `shared`, draft and retrieval are one stage,
        because they share one core. Messages are counted as taking no time.
        """
        stages = [self.batches[2] / self.target]
        if shared:
            stages.append(self.batches[1] / (self.inner * self.shared))
        else:
            stages.append(self.batches[1] / (self.inner * self.retrieval))
            stages += [self.batches[0] / (self.inner * self.draft)] if self.draft else []
        return self.tokens * min(requests / self.latency, *stages)

    def run_ahead_bound(self, lookahead: int) -> float:
        """The bound E2 / (h·max(t3, D) + (1 − h)·L) in tokens/s for one request with run-ahead.

        h = α2^(γ2+1) is the chance that a whole block of γ2 = `lookahead` tokens and the token after it are guessed
        right.
        """
        guessed = self.acceptance ** (lookahead + 1)
        return self.tokens / (guessed * max(self.target, self.drafting) + (1 - guessed) * self.latency)
