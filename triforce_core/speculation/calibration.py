"""How probable it is that the tier above draws a token that the drafter ranks first, second, …

The noise of a request is the same at every tier. So the token that another tier draws is most often the drafter's own,
and else one whose perturbed logit is not much smaller. How often depends on the rank and on that gap, and hardly on the
temperature. It is learned from what the tier above has drawn, for all requests together.
"""

from bisect import bisect_left

from triforce_core.models.chain import RANKS
from triforce_core.models.drawing import Ranked

GAPS = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)  # edges of the classes of gaps
# The weight of the prior chance, in tokens; by which a token reduces that of earlier ones; the same for `first_right`.
TRUST, FADING, REMEMBERED = 4.0, 0.999, 0.98


class Calibration:
    """Counts by rank and class of gaps. The gap of the first rank is that to the second."""

    def __init__(self) -> None:
        classes = len(GAPS) + 1
        self.drawn = [[TRUST * prior(rank, each) for each in range(classes)] for rank in range(RANKS)]
        self.seen = [[TRUST] * classes for _ in range(RANKS)]
        self.first_right = 0.6  # how often the first of a ranking was drawn lately, whatever the gap

    def chances(self, ranked: Ranked) -> list[float]:
        """The chance of each token of a ranking."""
        return [self.drawn[rank][each] / self.seen[rank][each] for rank, each in enumerate(classes_of(ranked))]

    def learn(self, ranked: Ranked, token: int) -> None:
        """After this ranking the tier above drew that token."""
        self.first_right = REMEMBERED * self.first_right + (1 - REMEMBERED) * (bool(ranked) and ranked[0][0] == token)
        for rank, each in enumerate(classes_of(ranked)):
            self.drawn[rank][each] = FADING * self.drawn[rank][each] + (ranked[rank][0] == token)
            self.seen[rank][each] = FADING * self.seen[rank][each] + 1


def classes_of(ranked: Ranked) -> list[int]:
    gaps = [gap for _, gap in ranked]
    gaps[:1] = [gaps[1] if len(gaps) > 1 else GAPS[-1]] if gaps else []
    return [bisect_left(GAPS, gap) for gap in gaps]


def prior(rank: int, each: int) -> float:
    """Before anything is learned: as of a drafter and a target that were trained on the same text."""
    closeness: float = 0.61 ** (*GAPS, 2 * GAPS[-1])[each]
    return 1 - 0.68 * closeness if rank == 0 else 0.5 / (1 + rank) * closeness
