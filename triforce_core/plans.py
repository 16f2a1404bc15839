"""How far to draft: the plan of a request's next round, chosen from what passes cost and what is accepted.

Everything here is pure. The expected number of tokens of a round follows from the chances that drafted tokens are
accepted (Leviathan et al. 2023, eq. 1, with a level in between); its time from the passes that it takes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from triforce_core.messages import SCORED, Drafting

Array = NDArray[np.float64]
Floats = float | Array


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
    def by_lookup(self) -> bool:
        """Whether prompt lookup alone drafts, for the target."""
        return self.drafting is Drafting.LOOKUP and not self.retrieval and self.draft > 0

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
    """What a round of a plan is expected to be, or was, for one sequence; or arrays [n], for n plans or rounds."""

    tokens: Floats  # committed
    proposed: Floats  # tokens that the target verifies, if there are any; its pass has one token more
    passes: Floats  # of the retrieval tier
    verified: Floats  # tokens that each of these passes verifies; each has one token more
    steps: Floats  # passes of the drafting model
    drafts: Floats = 1.0  # the chance that anything is proposed; if not, the target passes over one token


# From a number of tokens of each sequence, or an array of such numbers, to the seconds of a tier's pass over them.
Pass = Callable[[Floats], Floats]


class Costs(NamedTuple):
    """The seconds of a pass of each tier over so many tokens of each sequence, and how passes make up a round."""

    plain_s: float  # a pass of the target over one token of every sequence
    target: Pass
    retrieval: Pass
    draft: Pass
    groups: int = 1  # micro-batches that sequences with drafts are divided into
    overlapping: bool = False  # whether tiers have devices of their own, and so work at the same time

    def round_s(self, expected: Round) -> Array:
        """The seconds, [n], from one answer of the target for a sequence to the next, for n plans or rounds."""
        chance = np.asarray(expected.drafts)
        tiers = np.array(
            [
                chance * self.target(1 + expected.proposed) + (1 - chance) * self.target(1),
                expected.passes * self.retrieval(1 + expected.verified),
                expected.steps * self.draft(1),
            ]
        )
        rounds = self.groups * tiers.sum(0)
        if self.overlapping:  # tiers work on other groups meanwhile: the slowest may set the pace
            rounds = np.maximum(tiers.sum(0), self.groups * tiers.max(0))
        return np.where(chance > 0, rounds, self.plain_s)


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


class Candidates:
    """The plans to choose from, as arrays [n] each, which are compared at once, because choosing takes time."""

    def __init__(self, each: Iterable[Plan]) -> None:
        self.each = sorted(each)  # of plans that are equally good, the first is chosen
        self.index = {plan: n for n, plan in enumerate(self.each)}
        self.retrieval, self.draft, self.drafting = np.array(self.each).T
        self.kinds = sorted({plan.kind for plan in self.each})
        self.kind_index = np.array([self.kinds.index(plan.kind) for plan in self.each])
        self.by_lookup = np.array([plan.by_lookup for plan in self.each])
        self.above = self.retrieval > 0  # whether the retrieval tier is between the lowest tier and the target
        self.nth = np.arange(1, self.draft.max() + 1)  # [most]: the number of a token in a draft
        self.within = self.nth <= self.draft[:, None]  # [n, most]: whether a draft has so many tokens


def expected_rounds(candidates: Candidates, acceptance: Acceptance) -> Round:
    """What a round of each of these plans is expected to be, [n] each."""
    retrieval, draft, drafting, above = candidates.retrieval, candidates.draft, candidates.drafting, candidates.above
    looked_up = np.full(len(candidates.nth), acceptance.lookup_long, dtype=float)  # [most]
    looked_up[1:SCORED], looked_up[:1] = acceptance.lookup, acceptance.lookup_first
    # The chances, [n], that lookup drafts and that the model does. The index is the value of `Drafting`.
    by_lookup = np.array([0, acceptance.found, acceptance.found])[drafting]
    by_model = np.array([1, 0, 1 - acceptance.found])[drafting]
    model_chance = np.where(above, acceptance.model_below, acceptance.model)
    # [n, most]: the chance that at least 1, 2, … tokens of a draft are accepted
    by_model_each = by_model[:, None] * model_chance[:, None] ** candidates.nth
    accepted = (by_lookup[:, None] * looked_up.cumprod() + by_model_each) * candidates.within
    chance = (by_lookup + by_model) * (draft > 0)  # that there is a draft
    tokens = 1 + accepted.sum(1)  # of a pass that verifies a draft
    passes = expected_passes(retrieval, accepted)
    block = passes * tokens  # Wald's equation: all passes have the same distribution
    return Round(
        tokens=np.where(above, 1 + run(acceptance.retrieval, block), tokens),
        proposed=np.where(above, block, draft),
        passes=passes,
        verified=np.where(above, chance * draft, 0),
        steps=np.where(above, passes, 1) * by_model * draft,
        drafts=np.where(above, 1, chance),
    )


def expected_passes(blocks: NDArray[np.int64], accepted: Array) -> Array:
    """Passes until each block, [n], has so many tokens. A pass adds one token more than it accepts, and `accepted`,
    [n, most], are the chances that it accepts at least 1, 2, … tokens.
    """
    number, most = accepted.shape
    at_least = np.column_stack([np.ones(number), accepted, np.zeros(number)])
    chance = at_least[:, :-1] - at_least[:, 1:]  # [n, most + 1]: of 1, 2, … tokens in all
    # [n, blocks + 1]: the expected passes until a block that lacks 0, 1, … tokens is complete
    left = np.zeros((number, blocks.max() + 1))
    for missing in range(1, left.shape[1]):
        adds = min(missing, most + 1)
        # The passes left for a block that lacks 1, 2, … tokens fewer.
        fewer = left[:, missing - adds : missing][:, ::-1]
        left[:, missing] = 1 + (chance[:, :adds] * fewer).sum(1)
    return left[np.arange(number), blocks]


def run(chance: float, lengths: Array) -> Array:
    """The expected number of accepted tokens out of `lengths`, if each has this chance once all before it are."""
    return lengths if chance > 0.9999 else chance * (1 - chance**lengths) / (1 - chance)


class Usual(NamedTuple):
    """Rounds of all plans with drafts, on average: what their passes should take, and how much longer they took."""

    passes_s: float
    apart_s: float

    def seconds(self, passes_s: Floats) -> Floats:
        """What a round of a kind that is not known yet takes. Some of what a round takes beyond its passes grows with
        them, as where tiers compete for cores, and some does not, as links. The more favourable is assumed, because a
        trial shows if that is wrong: of a shorter round, all of it grows, and of a longer one nothing.
        """
        return passes_s + self.apart_s * np.minimum(1, passes_s / self.passes_s) if self.apart_s > 0 else passes_s


def corrected_s(passes_s: Floats, correction: Floats, doubt: Floats, usual: Usual) -> Floats:
    """The seconds that a round is expected to take whose passes should take so many. `doubt`: the weight of `usual`."""
    return (1 - doubt) * correction * passes_s + doubt * usual.seconds(passes_s)


class Situation(NamedTuple):
    """What a plan is chosen for."""

    costs: Costs
    acceptance: Acceptance
    corrections: Mapping[str, float]  # by kind of plan: what rounds took, relative to what their passes should take
    doubts: Mapping[str, float]  # by kind of plan: the weight of `usual` beside the correction, 0 to 1; 0 if left out
    usual: Usual
    cut_s: float  # where a first snapshot is needed: the seconds that the engine takes to cut it
    renewal_s: float  # seconds per token for later snapshots
    remaining: int  # tokens until a request must end, on average; at most the controller's `HORIZON`
    by_lookup: bool = True  # whether prompt lookup alone may draft for the target

    def seconds(self, candidates: Candidates) -> Array:
        """The expected seconds per token of each plan, [n]; infinite for a plan that may not be chosen."""
        expected = expected_rounds(candidates, self.acceptance)
        corrections = np.array([self.corrections[kind] for kind in candidates.kinds])[candidates.kind_index]
        doubts = np.array([self.doubts.get(kind, 0.0) for kind in candidates.kinds])[candidates.kind_index]
        cuts_s = self.cut_s / self.remaining + self.renewal_s
        rounds_s = corrected_s(self.costs.round_s(expected), corrections, doubts, self.usual)
        seconds = np.asarray(rounds_s / expected.tokens + cuts_s * (candidates.retrieval > 0))
        return seconds if self.by_lookup else np.where(candidates.by_lookup, np.inf, seconds)


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


def choose(candidates: Candidates, situation: Situation, present: Plan = PLAIN) -> Choice:
    """The plan with the least expected seconds per token, or `present` unless another is clearly better."""
    seconds = situation.seconds(candidates)
    plain, now, best = candidates.index[PLAIN], candidates.index[present], int(seconds.argmin())
    if not seconds[best] <= seconds[plain] * WORTHWHILE:
        best = plain
    elif seconds[now] * CHANGE <= seconds[best] and seconds[now] <= seconds[plain] * WORTHWHILE:
        best = now
    return Choice(candidates.each[best], float(seconds[best]), float(seconds[plain]))
