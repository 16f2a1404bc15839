"""A search for the best number of CPU threads for each tier, one arrangement after another while a request is decoded.

The gain from more threads depends on model, context and machine, and on the load of the other tiers on the same cores.
So whole rounds are timed: plain ones for the target, and for the drafting tiers rounds in which all tiers work.
"""

from collections.abc import Collection, Generator, Mapping
from statistics import median

Arrangement = dict[str, int]  # CPU threads of a decoding pass, by tier
Round = tuple[float, int]  # seconds, and tokens committed

ROUNDS, TURNS = 4, 3  # four rounds with the best arrangement and four with its challenger, three times
# More threads are kept only if the time per token with them is below this share of that with fewer: a smaller
# difference may be an error of measurement.
TIE = 0.9


class ThreadSearch:
    """Begins with the most threads for each tier, and halves those of one tier after another as long as the time per
    token hardly grows (`TIE`). Run the next round with `arrangement` and pass its time to `took`; once `done`, `best`
    is the result.
    """

    def __init__(self, most: Mapping[str, int], tiers: Collection[str]) -> None:
        """`most`: the threads to begin with. `tiers`: those searched, in this order; the others keep theirs."""
        self.best: Arrangement = dict(most)
        self.arrangement = self.best
        self.done = False
        self._steps = self._search([tier for tier in tiers if tier in most])
        next(self._steps, None)

    def took(self, seconds: float, tokens: int) -> None:
        """Record the time and the committed tokens of the last round, which ran with `arrangement`."""
        if not self.done:
            self._steps.send((seconds, tokens))

    def _search(self, tiers: Collection[str]) -> Generator[None, Round, None]:
        for tier in tiers:
            while self.best[tier] > 1:
                fewer = self.best | {tier: self.best[tier] // 2}
                if not (yield from self._as_good(fewer)):
                    break
                self.best = fewer
        self.arrangement, self.done = self.best, True
        yield

    def _as_good(self, fewer: Arrangement) -> Generator[None, Round, bool]:
        """Whether the time per token with `fewer`, times `TIE`, is at most that with the best arrangement so far."""
        times: list[list[float]] = [[], []]  # seconds per token in each turn: with the best, with fewer
        for _ in range(TURNS):
            for arrangement, taken in zip((self.best, fewer), times, strict=True):
                self.arrangement = arrangement
                yield  # the first round after a change is not counted
                rounds = []
                for _ in range(ROUNDS):
                    rounds.append((yield))
                taken.append(sum(seconds for seconds, _ in rounds) / max(1, sum(tokens for _, tokens in rounds)))
        return median(times[0]) >= TIE * median(times[1])
