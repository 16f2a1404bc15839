"""How many CPU threads each tier should decode on: found while a request is decoded, one arrangement after another.

How much more threads bring depends on model, context and machine, and on what the other tiers do meanwhile on the same
cores. So all tiers are at work while the time of whole rounds is taken.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from statistics import median

Arrangement = dict[str, int]  # CPU threads of a decoding pass, by tier
Round = tuple[float, int]  # seconds, and tokens committed

ROUNDS, TURNS = 4, 3  # an arrangement is timed for four rounds, three times, in turn with the one that it challenges
TIE = 0.9  # threads are worth having where a token takes less than this share of its time with half of them


class ThreadSearch:
    """Begins with all threads for each tier, and halves those of one tier after another as long as a token takes at most a tenth longer.

    `arrangement` is what to run the next round with; `took` is told each round's time. `best` is what was found so far,
    and once `done` the answer.
    """

    def __init__(self, most: Mapping[str, int]) -> None:
        """`most`: the threads that there are for each tier; the tiers are tried in this order."""
        self.best: Arrangement = dict(most)
        self.arrangement = self.best
        self.done = False
        self._steps = self._search()
        next(self._steps, None)

    def took(self, seconds: float, tokens: int) -> None:
        """The last round's, with `arrangement`."""
        if not self.done:
            self._steps.send((seconds, tokens))

    def _search(self) -> Generator[None, Round, None]:
        for tier in self.best:
            while self.best[tier] > 1:
                fewer = self.best | {tier: self.best[tier] // 2}
                if not (yield from self._as_good(fewer)):
                    break
                self.best = fewer
        self.arrangement, self.done = self.best, True
        yield

    def _as_good(self, fewer: Arrangement) -> Generator[None, Round, bool]:
        """Whether a token takes at most a tenth longer with this arrangement than with the best so far: TIE is what such
        measurements are off by.
        """
        times: list[list[float]] = [[], []]  # seconds a token in each turn: of the best, and with fewer
        for _ in range(TURNS):
            for arrangement, taken in zip((self.best, fewer), times, strict=True):
                self.arrangement = arrangement
                yield  # the first round after a change is not counted
                rounds = []
                for _ in range(ROUNDS):
                    rounds.append((yield))
                taken.append(sum(seconds for seconds, _ in rounds) / max(1, sum(tokens for _, tokens in rounds)))
        return median(times[0]) >= TIE * median(times[1])
