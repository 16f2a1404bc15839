"""Whether a snapshot still serves: how much of the retrieval tier's drafts is accepted, by the snapshot's age."""

from dataclasses import dataclass, field
from math import sqrt

from triforce_core.messages import Tally

# Standard errors by which acceptance must have fallen, and judged tokens that both sides must have. The question is
# asked after every round. With these limits, in simulations: if acceptance (.5 to .98) does not change, at most one
# snapshot of fifty is replaced early; if it falls from .9 to .5 within the interval, four of five falls are noticed.
CLEAR_FALL, LEAST_JUDGED = 2.5, 16


@dataclass(slots=True)
class SinceCut:
    """What the target made of one request's drafts since its latest snapshot arrived at the retrieval tier."""

    first: Tally = field(default_factory=Tally)  # of the first tokens
    later: Tally = field(default_factory=Tally)  # of those after them

    def add(self, tally: Tally, num_first: int) -> None:
        """Add a round of the target: to `first` until that has `num_first` judged tokens or more, then to `later`."""
        if self.first.accepted + self.first.rejected < num_first:
            self.first += tally
        else:
            self.later += tally


def has_sagged(first: Tally, later: Tally) -> bool:
    """Whether acceptance has clearly fallen, against the standard error if both sides had the same chance."""
    before, after = first.accepted + first.rejected, later.accepted + later.rejected
    if min(before, after) < LEAST_JUDGED:
        return False
    chance = (first.accepted + later.accepted + 1) / (before + after + 2)  # neither 0 nor 1 (Laplace)
    error = sqrt(chance * (1 - chance) * (1 / before + 1 / after))
    return first.accepted / before - later.accepted / after > CLEAR_FALL * error
