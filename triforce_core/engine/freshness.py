"""Whether a snapshot still serves: how much of the retrieval tier's drafts is accepted, by the snapshot's age."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

from triforce_core.messages import Tally

# Standard errors by which acceptance must have fallen. Chance alone exceeds two in one of forty comparisons, so that a
# snapshot that still serves is seldom replaced; a needless cut takes a little time and changes no token.
CLEAR_FALL = 2.0


@dataclass(slots=True)
class SinceCut:
    """What the target made of one request's drafts since its latest snapshot was cut."""

    first: Tally = field(default_factory=Tally)  # of the first tokens
    later: Tally = field(default_factory=Tally)  # of those after them

    def add(self, tally: Tally, num_first: int) -> None:
        """Add a round of the target. `num_first`: how many judged tokens, at least, count as the first."""
        if self.first.accepted + self.first.rejected < num_first:
            self.first += tally
        else:
            self.later += tally


def has_sagged(first: Tally, later: Tally) -> bool:
    """Whether acceptance has clearly fallen from `first` to `later`: the difference of the two shares, against its
    standard error if both had the same chance.
    """
    before, after = first.accepted + first.rejected, later.accepted + later.rejected
    if not before or not after:
        return False
    chance = (first.accepted + later.accepted + 1) / (before + after + 2)  # neither 0 nor 1 (Laplace)
    error = sqrt(chance * (1 - chance) * (1 / before + 1 / after))
    return first.accepted / before - later.accepted / after > CLEAR_FALL * error
