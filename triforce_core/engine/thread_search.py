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
WORTH = 0.9  # more threads are taken where a token then takes at most this share of its time with fewer


class ThreadSearch:
    """Begins with one thread for each tier, and doubles those of one tier after another while that pays.

    `arrangement` is what to run the next round with; `took` is told each round's time. `best` is what was found so far,
    and once `done` the answer.
    """

    def __init__(self, most: Mapping[str, int]) -> None:
        """`most`: the threads that there are for each tier; the tiers are tried in this order."""
        self.best: Arrangement = dict.fromkeys(most, 1)
        self.arrangement = self.best
        self.done = False
        self._steps = self._search(most)
        next(self._steps, None)

    @property
    def rounds(self) -> int:
        """How many rounds one comparison takes."""
        return 2 * TURNS * (ROUNDS + 1)

    def took(self, seconds: float, tokens: int) -> None:
        """The last round's, with `arrangement`."""
        if not self.done:
            self._steps.send((seconds, tokens))

    def _search(self, most: Mapping[str, int]) -> Generator[None, Round, None]:
        for tier, threads in most.items():
            while self.best[tier] < threads:
                more = self.best | {tier: min(2 * self.best[tier], threads)}
                if not (yield from self._pays(more)):
                    break
                self.best = more
        self.arrangement, self.done = self.best, True
        yield

    def _pays(self, more: Arrangement) -> Generator[None, Round, bool]:
        """Whether this arrangement is faster than the best so far by more than the noise of such measurements."""
        times: list[list[float]] = [[], []]  # seconds a token in each turn: of the best, and of `more`
        for _ in range(TURNS):
            for arrangement, taken in zip((self.best, more), times, strict=True):
                self.arrangement = arrangement
                yield  # the first round after a change is not counted
                rounds = []
                for _ in range(ROUNDS):
                    rounds.append((yield))
                taken.append(sum(seconds for seconds, _ in rounds) / max(1, sum(tokens for _, tokens in rounds)))
        return median(times[1]) <= WORTH * median(times[0])
