"""The controller chooses how far to draft, so that decoding is not slower than without speculation, except for a
bounded loss.

How many tokens a round of a plan gives is computed from how many drafted tokens were accepted (plans.py); how long it
takes is measured. docs/decisions/0020-plans-by-measurement.md says why.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from triforce_core.engine.acceptances import Acceptances, Drafted
from triforce_core.engine.sequence import Sequence
from triforce_core.messages import Drafting, Proposal, Tally, Work
from triforce_core.plans import PLAIN, UNDECIDED, Acceptance, Choice, Plan, Round, expected_round, plans

log = logging.getLogger(__name__)

FADING = 0.9995  # factor by which each committed token reduces the weight of what requests and rounds have shown
REMEMBERED = 0.9  # weight of a measured time relative to the next one
# A machine has hiccups. So a measured time counts as at most so many times what was known, or as what was guessed if it
# is the first; and a round counts as a loss of at most so many times what was expected.
MOST_NEW, MOST_FIRST, MOST_COUNTED = 2.0, 10.0, 4.0
# Before any was seen, in passes of the target over one token: a pass of the retrieval tier, one of the drafting model,
# and what one more token adds to a pass of the target. Guesses on the low side are tried, and so corrected.
RETRIEVAL_PASS, DRAFT_PASS, TOKEN = 0.2, 0.05, 0.03
MOST_LEAST = 0.9  # so that the model drafts where it is sure
WORTHWHILE = 0.92  # a plan must take less than this part of the time of plain decoding
CHANGE = 0.97  # and less than this part of the time of the plan that it replaces
REPLAN = 8  # tokens of each request after which a plan is chosen again
MOST_SELDOM = 8  # where nothing pays, it is chosen up to so many times more seldom
HORIZON = 192  # tokens over which the cost of beginning to speculate must pay
PAID_OVER = 64  # with each token, the share 1 / `PAID_OVER` of this cost counts as lost
# In tokens of plain decoding: what speculation may cost each request on average, beside the share `LOSS_SHARE` of its
# tokens; and the most that a request's earlier savings may make up for.
LOSS, LOSS_SHARE, CREDIT = 6.0, 0.015, 16.0
# Plain decoding is measured again for `TRIAL` rounds after so many tokens: half as many where speculation gains little,
# up to three times as many where it gains much.
TRIAL_EVERY, TRIAL = 300, 3
HELD_BACK = "decoded plainly for now, because speculation has cost more than it may"


@dataclass(slots=True)
class Mean:
    """A mean in which older values count less and less."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """`weight`: how many times it counts; less than 1 if several values are of one round."""
        kept = REMEMBERED**weight
        self.total, self.weight = kept * self.total + weight * value, kept * self.weight + weight

    def learn(self, value: float, before: float, weight: float = 1.0) -> None:
        """As `add`, for a time that a hiccup may have made longer. `before`: a prior estimate."""
        most = MOST_NEW * self.given(before) if self.weight else MOST_FIRST * before
        self.add(min(value, most), weight)

    def fade(self, kept: float) -> None:
        self.total, self.weight = kept * self.total, kept * self.weight

    def given(self, before: float, trust: float = 1.0) -> float:
        """The mean, with the prior estimate `before` as `trust` values more; `before` if there are no values."""
        weight = self.weight + trust
        return (self.total + trust * before) / weight if weight else before

    def hint(self) -> Mean:
        """The mean with the weight of at most one value, for what is similar."""
        kept = min(1.0, 1 / self.weight) if self.weight > 1e-6 else 0.0
        return Mean(kept * self.total, kept * self.weight)


@dataclass(slots=True)
class Times:
    """What rounds took, in seconds, under one load and at one length of texts."""

    plain_s: Mean = field(default_factory=Mean)  # a round of plain decoding
    token_s: Mean = field(default_factory=Mean)  # what each further token adds to a pass of the target
    retrieval_s: Mean = field(default_factory=Mean)  # a pass of the retrieval tier
    draft_s: Mean = field(default_factory=Mean)  # a pass of the drafting model
    # By kind of plan: the time of rounds relative to their passes.
    ratio: dict[str, Mean] = field(default_factory=lambda: defaultdict(Mean))
    # What beginning to draft costs a request, with the retrieval tier or without: snapshots, and tiers that catch up.
    begin_s: dict[bool, Mean] = field(default_factory=lambda: defaultdict(Mean))

    def passes_s(self, of: Round) -> float:
        """What the passes of a round take together, if a plain round was seen."""
        plain_s = self.plain_s.given(0.0, 0.0)
        return (
            plain_s
            + of.proposed * self.token_s.given(TOKEN * plain_s)
            + of.passes * self.retrieval_s.given(RETRIEVAL_PASS * plain_s)
            + of.steps * self.draft_s.given(DRAFT_PASS * plain_s)
        )

    def least_gain(self, plan: Plan, of: Round) -> float:
        """How many tokens the tier above the drafting model gives in the time that a pass of this model takes, and a
        further token of the target if that is the tier above: a pass that is expected to give less is not worth it.
        """
        plain_s = self.plain_s.given(0.0, 0.0)
        draft_s = self.draft_s.given(DRAFT_PASS * plain_s)
        if plan.retrieval:
            taken_s = of.passes * self.retrieval_s.given(RETRIEVAL_PASS * plain_s) + of.steps * draft_s
            return min(MOST_LEAST, of.proposed * draft_s / taken_s)
        further_s = draft_s + self.token_s.given(TOKEN * plain_s)
        return min(MOST_LEAST, of.tokens * further_s / self.passes_s(of))

    def fade(self, kept: float) -> None:
        """Forget a little of what passes and rounds with drafts take, so that what was slow is tried again."""
        for each in (self.token_s, self.retrieval_s, self.draft_s, *self.ratio.values()):
            each.fade(kept)

    def hints(self) -> Times:
        """What is known before anything was seen under a similar load."""
        found = Times(self.plain_s.hint(), self.token_s.hint(), self.retrieval_s.hint(), self.draft_s.hint())
        found.ratio.update({kind: each.hint() for kind, each in self.ratio.items()})
        found.begin_s.update({above: each.hint() for above, each in self.begin_s.items()})
        return found


class Load(NamedTuple):
    """A class of loads: requests (1, 2, 3 to 4, 5 to 8, …) and the length of their texts (each 1.4 times the last)."""

    requests: int
    length: int

    @classmethod
    def of(cls, decoding: Several[Sequence]) -> Load:
        length = fmean(len(s.tokens) for s in decoding)
        return cls((len(decoding) - 1).bit_length(), round(2 * math.log2(length)))

    def unlike(self, other: Load) -> int:
        return 4 * abs(self.requests - other.requests) + abs(self.length - other.length)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a controller has planned and learned."""

    latest: str  # the latest choice, with the reason
    rounds: dict[str, int]  # by kind of plan
    corrections: dict[str, float]  # by kind of plan, under the latest load: rounds relative to their passes
    acceptance: dict[float, Acceptance]  # by temperature


class Controller:
    """Plans the rounds of requests that set no lookaheads; all have one plan. The engine's thread calls it.

    `decoding` in its methods are the live requests whose prompts are prefilled, those with lookaheads included.
    """

    def __init__(self, lookaheads: tuple[int, int], draftings: tuple[Drafting, ...], nodes: int = 0) -> None:
        """`lookaheads`: the most tokens that the retrieval tier and the lowest tier draft; 0: it does not. `draftings`:
        how the lowest tier can draft. `nodes`: as in `Plan`.
        """
        self.plans = plans(lookaheads, draftings, nodes)
        self.looks_up = Drafting.LOOKUP in draftings and lookaheads[1] > 0  # the draft tier may do so
        self.known: dict[int, Acceptances] = {}  # what requests so far have shown, by temperature
        self.times: dict[Load, Times] = {}
        self.load = Load(0, 0)  # of the target's latest pass
        self.count = 1  # of requests in that pass
        self.choice, self.held_back = UNDECIDED, False  # for all planned requests
        self.plan_now = PLAIN  # of all planned requests
        self.least_gain = 0.0  # as in `Plan`, of the choice
        self.planned_at, self.planned_for = -1.0, 0  # the end of the pass before it, and the requests decoding then
        self.chosen_for = (0, frozenset[int]())  # of the latest choice: the class of loads, and the requests
        self.committed = self.chosen_at = 0  # tokens of all requests: so far, and at the latest choice
        self.seldom = 1  # how many times more seldom a plan is chosen, because nothing pays
        self.trial = 0  # plain rounds that are still to come before drafting goes on
        self.plain_at: dict[Load, int] = {}  # tokens committed when plain decoding was last measured, or tried
        self.rounds: dict[str, int] = {}  # by kind of plan, of requests that are planned here
        self.kinds: set[str] = set()  # of the plans in the latest pass
        # In seconds: the end of the latest pass, and of the last one before there were such plans and so many requests.
        self.passed_at = self.mixed_at = 0.0
        self.proposed = 0.0  # tokens that this pass verified of each request, on average
        self.waiting = False  # whether a request decodes plainly until its snapshot has arrived

    def figures(self) -> Figures:
        """What it has planned and learned so far. Any thread may call this."""
        times = self.times.get(self.load, Times())
        return Figures(
            f"{self.choice}; {HELD_BACK}" if self.held_back else str(self.choice) if self.choice.plain_s else "",
            dict(self.rounds),
            {kind: found.given(1.0) for kind, found in [*times.ratio.items()] if found.weight},
            {bucket / 4: known.given() for bucket, known in [*self.known.items()]},
        )

    # -- learning ------------------------------------------------------------------------------------------------------

    def passed(self, answers: list[tuple[Sequence, Proposal]], decoding: Several[Sequence], now: float) -> None:
        """To be called for each pass of the target. `answers`: what the pass gave, at `now` seconds."""
        latest, self.passed_at = self.passed_at, now
        if not decoding:
            return
        kinds = {plan_of(s.work).kind for s in decoding if s.work}
        if kinds != self.kinds or len(decoding) != self.count:
            self.kinds, self.mixed_at = kinds, latest
        self.load, self.count = Load.of(decoding), len(decoding)
        # A request that waits for a snapshot decodes plainly, but handing the snapshot over takes time from that round.
        self.waiting = any(s.plan_waits for s in decoding)
        if answers:
            self.proposed = fmean(p.tallies[0].proposed if p.tallies else 0 for _, p in answers)

    def learn(self, sequence: Sequence, proposal: Proposal, plan: Plan, round_s: float | None) -> None:
        """Learn from a round of a request that is planned here, with the score of prompt lookup in the draft level's
        tally if `looks_up`. `round_s`: its seconds without first snapshots; None if prompt chunks delayed it.
        """
        count, drafted = len(proposal.tokens), sequence.drafted
        self.committed += count
        self.rounds[plan.kind] = self.rounds.get(plan.kind, 0) + 1
        if len(proposal.tallies) > 1:  # else nothing was drafted, and no guess was scored
            self._known(sequence).add(plan, proposal.tallies)
            drafted.fade(len(sequence.tokens))
            drafted.acceptances.add(plan, proposal.tallies)
        first = plan.kind != drafted.kind  # tiers that did not take part until now have to catch up
        drafted.kind = plan.kind
        if not plan.speculates:
            self.trial = max(0, self.trial - 1)
            drafted.saved = min(CREDIT, drafted.saved + LOSS_SHARE)
        times, weight = self._times(self.load), 1 / self.count  # each request has measured the same round
        plain_s = times.plain_s.given(0.0, 0.0)
        if round_s is None or (plan.speculates and not plain_s):
            return
        alike = self.kinds == {plan.kind} and sequence.clock - round_s >= self.mixed_at
        if plan.speculates:
            counted_s = self._learn_drafts(times, drafted, proposal, plan, round_s, weight, first=first, alike=alike)
            drafted.begun_s = 0.0
            paid_s = drafted.unpaid_s * min(1, count / PAID_OVER)
            drafted.unpaid_s -= paid_s
            gained = count * (1 + LOSS_SHARE) - (counted_s + paid_s) / plain_s
            drafted.saved = min(CREDIT, drafted.saved + gained)
        elif alike and not (first or self.waiting):
            # Where drafting goes on, few plain rounds are measured, so each counts more.
            weight *= TRIAL if self.choice.plan.speculates else 1
            times.plain_s.add(min(round_s, MOST_NEW * (plain_s or round_s)), weight)
            self.plain_at[self.load] = self.committed

    def _learn_drafts(
        self,
        times: Times,
        drafted: Drafted,
        proposal: Proposal,
        plan: Plan,
        round_s: float,
        weight: float,
        *,
        first: bool,
        alike: bool,
    ) -> float:
        """Learn what a round with drafts has taken, if all requests had such rounds (`alike`). Returns the seconds that
        count against what its tokens have saved.
        """
        target, below, leaf = (*proposal.tallies, Tally(), Tally(), Tally())[:3]
        plain_s, ratio = times.plain_s.given(0.0, 0.0), times.ratio[plan.kind]
        if (plan.retrieval or plan.drafting is not Drafting.LOOKUP) and not target.proposed:
            drafted.kind = ""  # a tier did not answer in time, or is not there, and will have to catch up
            return min(round_s, MOST_COUNTED * plain_s)
        if alike and self.proposed and not (first and times.token_s.weight):
            times.token_s.learn(max(0.0, target.busy_s - plain_s) / self.proposed, TOKEN * plain_s, weight)
        if alike and not first:  # in a first round the drafting model also reads the text
            if below.passes:
                times.retrieval_s.learn(below.busy_s / below.passes, RETRIEVAL_PASS * plain_s, weight)
            if leaf.passes:
                times.draft_s.learn(leaf.busy_s / leaf.passes, DRAFT_PASS * plain_s, weight)
        passes_s = times.passes_s(Round(len(proposal.tokens), self.proposed, below.passes, leaf.passes))
        expected_s = passes_s * ratio.given(1.0)
        if first:
            late_s = max(0.0, round_s - expected_s)
            cut_s = drafted.begun_s if plan.retrieval else 0.0
            if alike and (cut_s or not plan.retrieval):  # else an earlier snapshot still served
                begin_s = times.begin_s[plan.retrieval > 0]
                begin_s.learn(cut_s + late_s, max(plain_s, cut_s), weight)
            drafted.unpaid_s += late_s
            return min(round_s, expected_s)
        if alike:
            most = MOST_NEW if ratio.weight else MOST_COUNTED
            ratio.add(min(max(round_s, expected_s / most), expected_s * most) / passes_s, weight)
        return min(round_s, MOST_COUNTED * expected_s)

    def was_cut(self, sequence: Sequence, seconds: float) -> None:
        """A first snapshot, of whichever request, kept this one waiting for these seconds. Later ones count as part of
        rounds.
        """
        sequence.drafted.begun_s += seconds
        sequence.drafted.unpaid_s += seconds

    # -- planning ------------------------------------------------------------------------------------------------------

    def plan(self, decoding: Several[Sequence]) -> Plan:
        """The plan of the next round of each request that is planned here."""
        # Otherwise it was made for another request of this pass, and none has joined since.
        if self.planned_at != self.passed_at or len(decoding) > self.planned_for:
            self.planned_at, self.planned_for = self.passed_at, len(decoding)
            self.plan_now = self._plan(decoding)
        return self.plan_now

    def _plan(self, decoding: Several[Sequence]) -> Plan:
        planned = [s for s in decoding if s.request.lookaheads is None]
        load, ids = Load.of(decoding), frozenset(s.request_id for s in planned)
        # A choice without a price of plain decoding, as in a new process, is made again as soon as there is one.
        priced = self.choice.plain_s or not self._times(load).plain_s.weight
        due = self.committed - self.chosen_at >= REPLAN * self.seldom * len(planned)
        if (load.requests, ids) != self.chosen_for or not priced or (due and not self.trial):
            self.chosen_for = load.requests, ids
            self._choose(planned, load)
        self.trial = min(self.trial, TRIAL * len(planned))
        if self.trial:
            return PLAIN
        allowed = len(planned) * LOSS
        self.held_back = self.choice.plan.speculates and sum(s.drafted.saved for s in planned) < -allowed
        return PLAIN if self.held_back else self.choice.plan._replace(least_gain=self.least_gain)

    def _choose(self, planned: Several[Sequence], load: Load) -> None:
        """Choose a plan for these requests."""
        kept = FADING ** (self.committed - self.chosen_at)
        for known in self.known.values():
            known.fade(kept)
        for measured in self.times.values():
            measured.fade(kept)
        self.chosen_at = self.committed
        times, before = self._times(load), self.choice.plan
        if not times.plain_s.weight:
            self.choice, self.least_gain = UNDECIDED, 0.0
            return
        acceptance = self._acceptance(planned)
        remaining = min(HORIZON, fmean(s.spec.max_length - len(s.tokens) for s in planned))
        plain_s = times.plain_s.given(0.0, 0.0)
        seconds = {PLAIN: plain_s}
        for plan in self.plans:
            if plan.speculates:
                expected = expected_round(plan, acceptance)
                begin_s = times.begin_s[plan.retrieval > 0].given(0.0)
                begin_s *= fmean(s.drafted.kind != plan.kind for s in planned)
                round_s = times.passes_s(expected) * times.ratio[plan.kind].given(1.0)
                seconds[plan] = round_s / expected.tokens + begin_s / max(1, remaining)
        best = min(seconds, key=seconds.__getitem__)
        if seconds[best] > WORTHWHILE * plain_s:
            best = PLAIN
        elif CHANGE * seconds[before] <= seconds[best] and seconds[before] <= WORTHWHILE * plain_s:
            best = before
        self.choice = Choice(best, seconds[best], plain_s)
        self.least_gain = times.least_gain(best, expected_round(best, acceptance)) if best.draft else 0.0
        self.seldom = 1 if best.speculates or before.speculates else min(2 * self.seldom, MOST_SELDOM)
        for s in planned:
            s.stats.plan_changes += best.kind != before.kind
            s.stats.expected_ms, s.stats.plain_ms = 1e3 * seconds[best], 1e3 * plain_s
        if best.kind != before.kind:
            log.info("%d requests: %s", len(planned), self.choice)
        interval = len(planned) * TRIAL_EVERY * min(max(0.5, self.choice.gain - 1), 3.0)
        if best.speculates and self.committed - self.plain_at.get(load, -math.inf) >= interval:
            self.trial, self.plain_at[load] = TRIAL * len(planned), self.committed

    def _acceptance(self, planned: Several[Sequence]) -> Acceptance:
        each = []
        for s in planned:
            s.drafted.fade(len(s.tokens))
            each.append(s.drafted.acceptances.given(self._known(s).given()))
        return Acceptance(*map(fmean, zip(*each, strict=True)))

    def _known(self, sequence: Sequence) -> Acceptances:
        return self.known.setdefault(round(4 * sequence.spec.sampling.temperature), Acceptances())

    def _times(self, load: Load) -> Times:
        if load not in self.times:
            near = min(self.times, key=load.unlike, default=None)
            self.times[load] = Times() if near is None else self.times[near].hints()
        return self.times[load]


def plan_of(work: Work) -> Plan:
    """The plan of a round of decoding."""
    _, retrieval, draft = work.lookaheads if len(work.lookaheads) == 3 else (1, 0, 0)
    return Plan(retrieval, draft, work.drafting)


def recent_cut(sequence: Sequence, refresh_every: int) -> bool:
    """Whether the latest snapshot is recent enough for the retrieval tier's cache."""
    last = sequence.last_cut
    return last is not None and len(sequence.tokens) - last.position < 2 * refresh_every
