"""How far to draft: the plans of a round, and how many tokens each is expected to give.

Everything here is pure. The expected number of tokens of a round follows from the chances that drafted tokens are
accepted (Leviathan et al. 2023, eq. 1, with a level in between).
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from triforce_core.messages import SCORED, Drafting


class Plan(NamedTuple):
    """The lookaheads of a request's rounds, and who drafts at the lowest tier."""

    retrieval: int  # tokens that the retrieval tier drafts for the target; 0: it is left out
    draft: int  # tokens that the lowest tier drafts for the tier above it; 0: it is left out
    drafting: Drafting = Drafting.MODEL
    nodes: int = 0  # most tokens of a tree that the model drafts for the retrieval tier; 0: it drafts one continuation
    # The fewest tokens that a further pass of the model must be expected to give.
    least_gain: float = 0.0

    @property
    def lookaheads(self) -> tuple[int, int]:
        return self.retrieval, self.draft

    @property
    def speculates(self) -> bool:
        return any(self.lookaheads)

    @property
    def kind(self) -> str:
        """The plan without its numbers, such as `retrieval+model`; `plain` where nothing is drafted."""
        return kind_of(bool(self.retrieval), self.drafting if self.draft else None)

    def __str__(self) -> str:
        return f"{self.kind} {self.retrieval},{self.draft}" if self.speculates else self.kind


@cache
def kind_of(retrieval: bool, drafting: Drafting | None) -> str:
    tiers = ["retrieval"] * retrieval + ([] if drafting is None else [drafting.name.lower()])
    return "+".join(tiers) or "plain"


PLAIN = Plan(0, 0)


class Acceptance(NamedTuple):
    """The chances that a drafted token is accepted if those before it were, and what drafts of the model are like."""

    retrieval: float  # a token of the retrieval tier, by the target
    accepted: float  # no chance: the number of tokens of a draft of the model that the target accepts
    accepted_below: float  # the same, by the retrieval tier
    steps: float  # the passes of the model for a draft that the target verifies
    steps_below: float  # the same, where the retrieval tier does
    lookup_first: float  # the first token of a draft of prompt lookup, by either
    lookup: float  # one of the next tokens, up to the `SCORED`th, by either
    lookup_long: float  # one after these, by the target
    found: float  # the share of drafts for which prompt lookup finds something


class Round(NamedTuple):
    """What a round of a plan is expected to be, or was, for one sequence."""

    tokens: float  # committed
    proposed: float  # tokens that the target verifies
    passes: float  # of the retrieval tier
    steps: float  # passes of the drafting model


def plans(most: tuple[int, int], draftings: Sequence[Drafting], nodes: int) -> list[Plan]:
    """The plans to choose from, within these lookaheads: whole and half blocks of the retrieval tier, with and without
    drafts below, and drafts for the target, which may be as long as both lookaheads together. `nodes`: as in `Plan`.
    """
    retrieval, draft = most
    blocks = halves(retrieval)
    found = [PLAIN, *(Plan(block, 0) for block in blocks)]
    for drafting in draftings if draft else ():
        longest = retrieval + draft
        # How far the model drafts, it decides itself.
        direct = (longest,) if drafting is Drafting.MODEL else (4, longest)
        found += [Plan(0, n, drafting) for n in sorted({min(n, longest) for n in direct})]
        trees = nodes if drafting is not Drafting.LOOKUP else 0
        found += [Plan(block, draft, drafting, trees) for block in blocks]
    return found


def halves(most: int) -> list[int]:
    return sorted({most, most // 2} - {0})


def expected_round(plan: Plan, acceptance: Acceptance) -> Round:
    """What a round of the plan is expected to be."""
    if not plan.speculates:
        return Round(1, 0, 0, 0)
    accepted, by_lookup, by_model = drafts_accepted(plan, acceptance)
    tokens = 1 + sum(accepted)  # of a pass that verifies a draft
    if not plan.retrieval:
        steps = by_model * min(acceptance.steps, plan.draft)
        return Round(tokens, by_lookup * plan.draft + steps, 0, steps)
    passes = expected_passes(plan.retrieval, accepted)
    block = passes * tokens  # Wald's equation: all passes have the same distribution
    steps = passes * by_model * min(acceptance.steps_below, plan.draft)
    return Round(1 + run(acceptance.retrieval, block), block, passes, steps)


def drafts_accepted(plan: Plan, acceptance: Acceptance) -> tuple[list[float], float, float]:
    """The chances that at least 1, 2, … tokens of a draft of the lowest tier are accepted, that prompt lookup makes the
    draft, and that the model does.
    """
    by_lookup = 0.0 if plan.drafting is Drafting.MODEL else acceptance.found
    by_model = 0.0 if plan.drafting is Drafting.LOOKUP or not plan.draft else 1 - by_lookup
    later = [acceptance.lookup] * (SCORED - 1) + [acceptance.lookup_long] * plan.draft
    looked_up = accumulate([acceptance.lookup_first, *later][: plan.draft], mul)
    each = chance_of(acceptance.accepted_below if plan.retrieval else acceptance.accepted, plan.draft)
    accepted = [by_lookup * chance + by_model * each**n for n, chance in enumerate(looked_up, 1)]
    return accepted, by_lookup, by_model


def chance_of(accepted: float, most: int) -> float:
    """The chance of each token that gives drafts of `most` tokens this mean number of accepted ones."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if run(middle, most) < accepted else (low, middle)
    return high


def expected_passes(block: int, accepted: Sequence[float]) -> float:
    """Passes until a block has so many tokens. A pass adds one token more than it accepts; `accepted` as above."""
    chances = [more - most for more, most in pairwise([1.0, *accepted, 0.0])]  # that a pass adds 1, 2, … tokens
    left = [0.0]  # the passes until a block that lacks 0, 1, … tokens is complete
    for missing in range(1, block + 1):
        left.append(1 + sum(chance * left[missing - n] for n, chance in enumerate(chances, 1) if n < missing))
    return left[block]


def run(chance: float, length: float) -> float:
    """The expected number of accepted tokens out of `length`, if each has this chance once all before it are."""
    return length if chance > 0.9999 else chance * (1 - chance**length) / (1 - chance)


class Choice(NamedTuple):
    """A plan, and why it was chosen."""

    plan: Plan
    seconds: float  # expected per token
    plain_s: float  # the same of plain decoding

    @property
    def gain(self) -> float:
        """How many times as fast as plain decoding."""
        return self.plain_s / self.seconds if self.seconds else 1.0

    def __str__(self) -> str:
        return f"{self.plan}, {1e3 * self.seconds:.1f} ms a token expected, {1e3 * self.plain_s:.1f} if plain"


UNDECIDED = Choice(PLAIN, 0.0, 0.0)
