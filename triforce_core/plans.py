"""How far to draft: the plan of a request's next round, chosen from what passes cost and what is accepted.

Everything here is pure. The expected number of tokens of a round follows from the chances that drafted tokens are
accepted (Leviathan et al. 2023, eq. 1, with a level in between); its time from the passes that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

from triforce_core.messages import SCORED, Drafting


class Plan(NamedTuple):
    """The lookaheads of a request's rounds, and who drafts at the lowest tier."""

    retrieval: int  # tokens that the retrieval tier drafts for the target; 0: it is left out
    draft: int  # tokens that the lowest tier drafts for the tier above it; 0: it is left out
    drafting: Drafting = Drafting.MODEL

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
    """The chances that a drafted token is accepted if those before it were."""

    retrieval: float  # a token of the retrieval tier, by the target
    model: float  # a token of the drafting model, by the target
    model_below: float  # the same, by the retrieval tier
    lookup_first: float  # the first token of a draft of prompt lookup, by either
    lookup: float  # one of the next tokens, up to the `SCORED`th, by either
    lookup_long: float  # one after these, by the target
    found: float  # the share of drafts for which prompt lookup finds something


class Round(NamedTuple):
    """What a round of a plan is expected to be, or was, for one sequence."""

    tokens: float  # committed
    proposed: float  # tokens that the target verifies; its pass has one token more
    passes: float  # of the retrieval tier
    verified: float  # tokens that each of these passes verifies; each has one token more
    steps: float  # passes of the drafting model
    drafts: float = 1.0  # the chance that anything is proposed; if not, the target passes over one token


# From a number of tokens of each sequence to the seconds of a tier's pass over them.
Pass = Callable[[float], float]


class Costs(NamedTuple):
    """Under the present load: the seconds of a pass of each tier over so many tokens of each of its sequences, and how
    passes make up a round.
    """

    plain_s: float  # a pass of the target over one token of every sequence
    target: Pass
    retrieval: Pass
    draft: Pass
    groups: int = 1  # micro-batches that sequences with drafts are divided into
    overlapping: bool = False  # whether tiers have devices of their own, and so work at the same time

    def round_s(self, expected: Round) -> float:
        """The seconds from one answer of the target for a sequence to the next."""
        if not (chance := expected.drafts):
            return self.plain_s
        tiers = [chance * self.target(1 + expected.proposed / chance) + (1 - chance) * self.target(1)]
        if expected.passes:
            tiers.append(expected.passes * self.retrieval(1 + expected.verified))
        if expected.steps:
            tiers.append(expected.steps * self.draft(1))
        if self.overlapping:  # tiers work on other groups meanwhile: the slowest may set the pace
            return max(sum(tiers), self.groups * max(tiers))
        return self.groups * sum(tiers)


def plans(most: tuple[int, int], draftings: Sequence[Drafting]) -> Iterator[Plan]:
    """All plans within these lookaheads. Without the retrieval tier, the lowest tier may draft a whole block."""
    retrieval, draft = most
    yield PLAIN
    for drafting in draftings if draft else ():
        for direct in steps(retrieval + draft):
            yield Plan(0, direct, drafting)
        for block in steps(retrieval):
            for below in steps(draft):
                yield Plan(block, below, drafting)
    for block in steps(retrieval):
        yield Plan(block, 0)


def steps(most: int) -> list[int]:
    """The lookaheads that are tried, up to `most`: all small ones, and larger ones at growing distances."""
    tried = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128]
    return sorted({*(n for n in tried if n < most), most} - {0})


def expected_round(plan: Plan, acceptance: Acceptance) -> Round:
    """What a round of this plan is expected to be."""
    if not plan.speculates:
        return Round(1, 0, 0, 0, 0, drafts=0)
    _, model_above, model_below, *looked_up = acceptance
    model = model_below if plan.retrieval else model_above
    # Rounded, so that `expected_draft` and `expected_passes` find most results in their caches.
    draft = expected_draft(
        plan.draft,
        plan.drafting,
        *(round(chance, 2) for chance in (model, *looked_up)),
    )
    if not plan.retrieval:
        return Round(1 + sum(draft.accepted), draft.proposed, 0, 0, draft.steps, draft.chance)
    passes = expected_passes(plan.retrieval, draft.accepted)
    block = passes * (1 + sum(draft.accepted))  # Wald's equation: all passes have the same distribution
    return Round(1 + run(acceptance.retrieval, block), block, passes, draft.proposed, passes * draft.steps)


class Draft(NamedTuple):
    """What the lowest tier is expected to draft at a time."""

    accepted: tuple[float, ...]  # the chance that at least 1, 2, … tokens are accepted
    proposed: float  # tokens
    steps: float  # passes of the drafting model
    chance: float  # that there are any


@lru_cache(maxsize=4096)
def expected_draft(
    count: int, drafting: Drafting, model: float, lookup_first: float, lookup: float, lookup_long: float, found: float
) -> Draft:
    """The draft of up to `count` tokens, of which each is accepted with the chance of who drafted it."""
    found = {Drafting.MODEL: 0.0, Drafting.LOOKUP: found, Drafting.BOTH: found}[drafting]
    modelled = 0.0 if drafting is Drafting.LOOKUP else 1 - found
    chances = [lookup_first, *[lookup] * (SCORED - 1), *[lookup_long] * (count - SCORED)][:count]
    accepted = tuple(found * looked + modelled * model**n for n, looked in enumerate(accumulate(chances, mul), 1))
    chance = (found + modelled) * (count > 0)
    return Draft(accepted, chance * count, modelled * count, chance)


@lru_cache(maxsize=4096)
def expected_passes(block: int, accepted: tuple[float, ...]) -> float:
    """Passes until a block has so many tokens. A pass adds one token more than it accepts, and the chances that it
    accepts at least 1, 2, … are given.
    """
    at_least = [1.0, *accepted, 0.0]
    chance = [more - less for more, less in pairwise(at_least)]  # of 1, 2, … tokens in all
    left = [0.0]  # left[n]: the expected passes until a block that lacks n tokens is complete
    for missing in range(1, block + 1):
        left.append(1 + sum(p * left[missing - n] for n, p in enumerate(chance[:missing], 1)))
    return left[block]


def run(chance: float, length: float) -> float:
    """The expected number of accepted tokens out of `length`, if each has this chance once all before it are."""
    return length if chance > 0.9999 else chance * (1 - chance**length) / (1 - chance)


class Situation(NamedTuple):
    """What a plan is chosen for."""

    costs: Costs
    acceptance: Acceptance
    corrections: Mapping[str, float]  # by kind of plan: what rounds took, relative to what their passes should take
    cut_s: float  # where a first snapshot is needed: the seconds that the engine takes to cut it
    renewal_s: float  # seconds per token for later snapshots
    remaining: int  # tokens until a request must end, on average; at most the controller's `HORIZON`

    def seconds(self, plan: Plan) -> float:
        """The expected seconds per token."""
        expected = expected_round(plan, self.acceptance)
        each = self.corrections[plan.kind] * self.costs.round_s(expected) / expected.tokens
        return each + (self.cut_s / self.remaining + self.renewal_s if plan.retrieval else 0.0)


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


WORTHWHILE = 0.92  # a plan must take less than this part of the time of plain decoding
CHANGE = 0.95  # and less than this part of the time of the plan that it replaces


def choose(candidates: Iterable[Plan], situation: Situation, present: Plan = PLAIN) -> Choice:
    """The plan with the least expected seconds per token. The present plan stays unless another is clearly better."""
    plain_s = situation.seconds(PLAIN)
    best_s, best = min((situation.seconds(plan), plan) for plan in candidates)
    if best_s > plain_s * WORTHWHILE:
        best_s, best = plain_s, PLAIN
    elif present.speculates:
        present_s = situation.seconds(present)
        if present_s * CHANGE <= best_s and present_s <= plain_s * WORTHWHILE:
            best_s, best = present_s, present
    return Choice(best, best_s, plain_s)
