"""The controller chooses how far each request drafts in its next round, so that decoding is not slower than without
speculation, except for a bounded loss by trials.

It learns what passes take and how many drafted tokens are accepted, and has `plans.choose` compare the plans. What no
pass shows (waiting, links, tiers that compete for cores) is learned as a correction for each kind of plan: the time of
rounds divided by what their passes should take. What it has learned slowly fades, so that plans are tried again.
"""

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import chain, groupby
from math import ceil
from statistics import fmean, median_low
from typing import NamedTuple

import numpy as np

from triforce_core.costs import DOUBT_OF_CUTS, DOUBT_OF_TOKENS, Floats, Part, PassCosts
from triforce_core.engine.acceptances import LONG_AGO, Acceptances, Drafted, Moment, in_vain, long_in_vain
from triforce_core.engine.sequence import Sequence
from triforce_core.kv.folds import MOST_QUERIES
from triforce_core.messages import Drafting, Proposal, Tally, Work
from triforce_core.plans import (
    PLAIN,
    Acceptance,
    Candidates,
    Choice,
    Costs,
    Plan,
    Round,
    Situation,
    Usual,
    choose,
    corrected_s,
    plans,
)

log = logging.getLogger(__name__)

FADING = 0.9995  # factor by which each committed token reduces the weight of what the server has learned
PRIOR = 0.5  # rounds: the weight of a prior estimate
ONLY_IF_UNKNOWN = 1e-9  # the weight of a prior estimate that counts only where there is nothing else
PLAIN_ROUNDS = 16  # plain rounds that are remembered
ROUND_MEMORY = 0.9  # weight of a measured round relative to the next one
MISLED = 1.0  # `Drafted.trust` of a request in which prompt lookup has lost
# Passes of the target after the kind of plan has changed, before plain rounds are typical: at first tiers catch up, or
# finish what they had begun.
SETTLING = 2
# A plan is chosen again after `REPLAN` tokens, `REPLAN_ROUNDS` rounds and `REPLAN_S` seconds, whichever takes longest.
# Choosing takes the engine's thread about 1 ms: with the bound in seconds 1% of the time at most. Without it,
# choosing would take up to a tenth of the time where decoding is fastest. If prompt lookup alone drafts, and the rounds
# of a request have lost the time of `LOSING` plain tokens since the last choice, only `REPLAN_S` is waited for.
REPLAN, REPLAN_ROUNDS, REPLAN_S, LOSING = 24, 5, 0.1, 2
HORIZON = 256  # tokens over which a first snapshot must pay
# The cost of starting to speculate is charged little by little: with each token, 1 / `PAID_OVER` of the cost that is
# left.
PAID_OVER = 128
# The unit of the next two is the time of one token in plain decoding. Savings beyond `CREDIT` do not make up for later
# losses. A round counts as a loss of at most `MOST_LOST`, because any plan has slow moments.
CREDIT = 16
MOST_LOST = 3
# Most that speculation may cost a request: the share `LOSS_SHARE` of its decoding time, plus the time of `LOSS_TOKENS`
# tokens in plain decoding. For a plan of prompt lookup alone, both numbers are multiplied by the gain that the plan
# promises, but `LOSS_TOKENS` at most by `LOOKUP_TOKENS`.
LOSS_SHARE, LOSS_TOKENS, LOOKUP_TOKENS = 0.015, 4, 2.0
# A trial measures plain decoding again, in its last two rounds. It takes `TRIAL` rounds, plus one for each micro-batch
# after the first. Where plain decoding takes twice as long as the present plan, there is a trial after every
# `TRIAL_EVERY` tokens per request. For other gains the interval is longer or shorter (`_trial_due`), so that trials
# cost about 1.6% of the time, and less where the gain is so large that plain decoding need not be known well.
TRIAL_EVERY, TRIAL = 256, SETTLING + 2
# Few rounds are known of each kind, so a single round that a hiccup of the machine made ten times as long would
# outweigh all others. Therefore a round counts as at most this factor longer or shorter than it was expected to be
# (`_correct`). Of plain rounds the median counts (`_plain_correction`).
MOST_NEW = 2.0
HELD_BACK = "decoded plainly for now, because speculation has cost more than it may"
IN_VAIN = "decoded plainly until a guess of prompt lookup is right"


@dataclass(frozen=True, slots=True)
class Tiers:
    """What the controller must know of a pipeline."""

    lookaheads: tuple[int, int]  # most tokens that the retrieval tier and the lowest tier draft; 0: it does not
    draftings: tuple[Drafting, ...]  # how the lowest tier can draft
    sparse_tokens: int  # keys that the retrieval tier typically reads
    window_tokens: int  # keys that the drafting model typically reads
    micro_batches: int = 1
    overlapping: bool = False  # whether tiers have devices of their own


@dataclass(slots=True)
class Recent:
    """A mean in which older values count less and less."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float = 1.0, rounds: float = 1.0) -> None:
        """`rounds`: the number of rounds that the value stands for; less than 1 if several values are of one round."""
        kept = ROUND_MEMORY**rounds
        self.total = kept * self.total + rounds * weight * value
        self.weight = kept * self.weight + rounds * weight

    def fade(self, kept: float) -> None:
        self.total *= kept
        self.weight *= kept

    def mean(self, before: float, trust: float = PRIOR) -> float:
        """The mean of the values and of the prior estimate `before`, which has the weight of `trust` values."""
        return (self.total + trust * before) / (self.weight + trust)

    @property
    def doubt(self) -> float:
        """The share of a prior estimate of the weight `PRIOR` in `mean`."""
        return PRIOR / (self.weight + PRIOR)


class Load(NamedTuple):
    """What was being decoded during a pass of the target."""

    requests: int = 0
    planned: int = 0  # how many of these requests the controller plans
    length: float = 0.0  # tokens of their texts, on average

    @property
    def kind(self) -> int:
        return kind_of_load(self.requests)


class Measurement(NamedTuple):
    """A round of one request."""

    kind: str  # of its plan
    load: Load
    passes: Round
    round_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What a controller has planned and learned."""

    latest: str  # the latest choice, with the reason
    rounds: dict[str, int]  # by kind of plan
    corrections: dict[str, float]  # by kind of plan, under the latest load
    acceptance: dict[float, Acceptance]  # by temperature


class Controller:
    """Plans the rounds of requests that set no lookaheads. The engine's thread calls it.

    `decoding` in its methods are the live requests whose prompts are prefilled, those with lookaheads included.
    """

    def __init__(self, tiers: Tiers, read: Callable[[], float] = lambda: 1.0) -> None:
        """`read`: how many keys the target's latest pass read, relative to those that it would have read if it read for
        each sequence alone; see `Reading.share` in `kv/folds.py`.
        """
        self.read, self.shared = read, 0.0  # `shared`: of each sequence's keys, the share that all sequences see
        self.tiers, self.candidates = tiers, Candidates(plans(tiers.lookaheads, tiers.draftings))
        self.looks_up = Drafting.LOOKUP in tiers.draftings and tiers.lookaheads[1] > 0  # the draft tier may do so
        self.target, self.retrieval, self.draft = (PassCosts(DOUBT_OF_TOKENS) for _ in range(3))
        self.known: dict[int, Acceptances] = {}  # what requests so far have shown, by temperature
        self.corrections: dict[tuple[str, int], Recent] = {}  # by kind of plan and load
        # By load, of rounds with drafts: seconds that their passes should take, and how much longer the rounds took.
        self.usual: dict[int, tuple[Recent, Recent]] = {}
        # First and later cuts of snapshots. Like passes over one token, they are priced by the length of the text.
        self.cuts, self.renewals = PassCosts(DOUBT_OF_CUTS), PassCosts(DOUBT_OF_CUTS)
        # By kind of plan and load: how many seconds of passes there are in a second of its rounds. Above 1 if tiers
        # share a device and work at the same time. Then they slow each other down, and each pass is taken for its share
        # of the time.
        self.busy: dict[tuple[str, int], Recent] = {}
        self.proposed = 0.0  # tokens that the latest pass of the target verified of each sequence, on average
        self.measured: deque[Measurement] = deque(maxlen=1024)  # rounds that are not in `corrections` yet
        # By load: the latest plain rounds, and the seconds that they took. The seconds themselves are kept, not their
        # ratio to what was predicted then. `_plain_correction` divides them by what the present prices predict, so
        # correction times prediction gives the measured seconds again, even if the prices have changed meanwhile.
        self.plain: dict[int, deque[tuple[Load, float]]] = {}
        self.counted = True  # whether `plain` has a round for the latest pass
        self.waiting = False  # whether a request decodes plainly until its snapshot has arrived
        self.stale: set[int] = set()  # loads whose earlier plain rounds are forgotten once there is a new one
        self.committed = self.faded_at = 0  # tokens of all requests: so far, and when `_fade` was last called
        self.plain_at: dict[int, int] = {}  # by load: tokens committed when plain decoding was last measured, or tried
        self.latest, self.load = "", Load()  # the latest choice in words, and the load of the target's latest pass
        self.chosen_for, self.plainly = 0, ""  # the request of that choice, and why it decodes plainly anyhow
        self.rounds: dict[str, int] = {}  # by kind of plan, of requests that are planned here
        # At the end of the last pass: how many requests were being decoded, and the kinds of plans of their rounds.
        self.mix: tuple[int, set[str]] = (0, set())
        self.mixed_at = 0.0  # when that last changed
        self.settling, self.settled_at = 0, 0.0  # passes until plain rounds are typical again, and when they were

    def figures(self) -> Figures:
        """What it has planned and learned so far. Any thread may call this."""
        at = self.load.kind
        corrections = {kind: found.mean(1.0) for (kind, load), found in [*self.corrections.items()] if load == at}
        if at in self.plain:
            corrections[PLAIN.kind] = self._plain_correction(self.load)
        return Figures(
            "; ".join(filter(None, (self.latest, self.plainly))),
            dict(self.rounds),
            corrections,
            {bucket / 4: known.given() for bucket, known in [*self.known.items()]},
        )

    # -- learning ------------------------------------------------------------------------------------------------------

    def passed(self, answers: list[tuple[Sequence, Proposal]], decoding: Several[Sequence], now: float) -> None:
        """Learn what passes take, once for each pass of the target. `answers`: what the pass gave, at `now` seconds."""
        kinds = {plan_of(s.work).kind for s in decoding if s.work}
        if (mix := (len(decoding), kinds)) != self.mix:
            if kinds != self.mix[1]:
                self.settling = SETTLING
            self.mix, self.mixed_at = mix, now
        if self.settling:
            self.settling, self.settled_at = self.settling - 1, now
        self.load, self.counted = load_of(decoding) if decoding else self.load, False
        # A request that waits for a snapshot decodes plainly, but handing the snapshot over takes time from that round.
        self.waiting = any(s.plan_waits for s in decoding)
        if not answers or any(sequence.prefilling for sequence, _ in answers):
            return  # the cost of a pass over a part of a prompt is not learned here
        levels = [(*proposal.tallies, Tally(), Tally(), Tally())[:3] for _, proposal in answers]
        read = self.read()
        self.proposed = fmean(target.proposed for target, _, _ in levels)
        parts = [Part(levels[i][0].proposed + 1, p.start, read) for i, (_, p) in enumerate(answers)]
        if len(parts) > 1 and max(part.tokens for part in parts) <= MOST_QUERIES:
            self.shared = (1 - read) / (1 - 1 / len(parts))
        slowed = fmean(max(1.0, self._busy(kind).mean(1.0, ONLY_IF_UNKNOWN)) for kind in kinds) if kinds else 1.0
        self.target.add(parts, levels[0][0].busy_s / slowed)
        batch, _ = self._batches(len(decoding))
        for (sequence, _), (_, below, leaf) in zip(answers, levels, strict=True):
            length = len(sequence.tokens)
            if below.passes:
                part = Part(1 + below.proposed / max(1, below.rounds), min(self.tiers.sparse_tokens, length))
                self.retrieval.add([part] * batch, below.busy_s / below.passes / slowed)
            if leaf.passes:
                self.draft.add(
                    [Part(1, min(self.tiers.window_tokens, length))] * batch, leaf.busy_s / leaf.passes / slowed
                )

    def learn(self, sequence: Sequence, proposal: Proposal, plan: Plan, round_s: float | None) -> None:
        """Learn from a round of a request that is planned here, with the score of prompt lookup in the draft level's
        tally if `looks_up`. `round_s`: its seconds without snapshot cuts; None if prompt chunks delayed it.
        """
        count, drafted = len(proposal.tokens), sequence.drafted
        self.committed += count
        self.rounds[plan.kind] = self.rounds.get(plan.kind, 0) + 1
        if len(proposal.tallies) > 1:  # else nothing was drafted, and no guess was scored
            self._known(sequence).add(plan, proposal.tallies)
            drafted.fade(len(sequence.tokens))
            drafted.acceptances.add(plan, proposal.tallies)
        leaf = (*proposal.tallies, Tally(), Tally(), Tally())[2]
        drafted.looked_up(plan, count, guessed=leaf.accepted > 0)
        self._account(drafted, plan, round_s, count)
        unanswered = plan.speculates and plan.drafting is not Drafting.LOOKUP and not proposal.tallies[0].proposed
        if round_s is None or unanswered or self.mix[1] != {plan.kind} or sequence.clock - round_s < self.mixed_at:
            return
        if plan.speculates:
            self.measured.append(Measurement(plan.kind, self.load, self._round(proposal, plan), round_s))
            if not self.tiers.overlapping:
                passes_s = self._batches(self.load.requests)[1] * sum(tally.busy_s for tally in proposal.tallies)
                self._busy(plan.kind).add(passes_s / round_s, round_s, 1 / self.load.planned)
        elif sequence.clock - round_s >= self.settled_at and not (self.counted or self.waiting):
            # One measurement a pass: the pass took the same time for its other requests.
            self.counted = True
            seen = self.plain.setdefault(self.load.kind, deque(maxlen=PLAIN_ROUNDS))
            while self.load.kind in self.stale and len(seen) > 2:
                seen.popleft()
            self.stale.discard(self.load.kind)
            seen.append((self.load, round_s))
            self.plain_at[self.load.kind] = self.committed

    def _busy(self, kind: str) -> Recent:
        return self.busy.setdefault((kind, self.load.kind), Recent())

    def _round(self, proposal: Proposal, plan: Plan) -> Round:
        """What passes a round had. The passes of the lower tiers come from the tallies of `proposal`. For the target's
        pass, the tokens to verify are the mean over the requests in its latest pass.
        """
        _, below, leaf = (*proposal.tallies, Tally(), Tally(), Tally())[:3]
        verified = below.proposed / below.rounds if below.rounds else 0.0
        return Round(
            len(proposal.tokens), self.proposed, below.passes, verified, leaf.passes, drafts=float(plan.speculates)
        )

    def _account(self, drafted: Drafted, plan: Plan, round_s: float | None, count: int) -> None:
        """Add what a round has saved or cost, against plain decoding of its `count` tokens."""
        plain_s = drafted.choice.plain_s
        paid_s = drafted.unpaid_s * min(1, count / PAID_OVER)
        drafted.unpaid_s -= paid_s
        drafted.saved_s -= paid_s
        if plan.speculates and plain_s and round_s is not None:
            gained_s = count * plain_s - round_s
            if plan.kind == drafted.kind:
                counted_s = max(gained_s, -MOST_LOST * plain_s)
                drafted.saved_s = min(drafted.saved_s + counted_s, CREDIT * plain_s)
                drafted.gained_s += counted_s
            else:  # tiers that did not take part until now had to catch up
                drafted.unpaid_s -= min(gained_s, 0)
        drafted.kind = plan.kind
        drafted.rounds += 1

    def was_cut(self, sequence: Sequence, seconds: float, *, first: bool) -> None:
        """Learn what a snapshot took on the engine's thread. `first`: the request had none that it could still use."""
        sequence.drafted.unpaid_s += seconds
        (self.cuts if first else self.renewals).add([whole(sequence)], seconds)

    # -- planning ------------------------------------------------------------------------------------------------------

    def plan(self, sequence: Sequence, decoding: Several[Sequence], refresh_every: int) -> Plan:
        """The plan of this request's next round."""
        drafted, length = sequence.drafted, len(sequence.tokens)
        if drafted.chosen_at is None:
            self._join(sequence, decoding)
        recent = self._recent(sequence, decoding)
        # A choice without a price of plain decoding, as in a new process, is made again as soon as there is one.
        unpriced = not drafted.choice.plain_s and self.target.few.known
        decided = drafted.trial or (recent and not unpriced)
        if not decided or drafted.load != kind_of_load(len(decoding)):
            self._choose(sequence, decoding, refresh_every)
        plan = drafted.choice.plan
        if drafted.trial:
            drafted.trial -= 1
            if not drafted.trial:
                drafted.chosen_at = LONG_AGO  # a plan is chosen after the last of these plain rounds
            return PLAIN
        together = self._together(sequence, decoding)
        plainly = ""  # why the request decodes plainly although its plan is another one
        if plan.speculates and lost_too_much(together):
            plainly = HELD_BACK
            if not drafted.said_held_back:
                log.info("request %d, %d tokens: %s", sequence.request_id, length, HELD_BACK)
                drafted.said_held_back = True
        elif plan.by_lookup and in_vain([s.drafted for s in together]):
            plainly = IN_VAIN
        sequence.stats.expected_ms = 1e3 * (drafted.choice.plain_s if plainly else drafted.choice.seconds)
        if sequence.request_id == self.chosen_for:
            self.plainly = plainly
        return PLAIN if plainly else plan

    def _recent(self, sequence: Sequence, decoding: Several[Sequence]) -> bool:
        """Whether this request has a plan that is too new for another choice."""
        chosen_at = sequence.drafted.chosen_at
        if chosen_at is None:
            return False
        # Where tiers have devices of their own, each planned request has a choice of its own.
        choices = load_of(decoding).planned if self.tiers.overlapping else 1
        seconds = choices * REPLAN_S
        least = Moment(0, 0, seconds) if loses(sequence) else Moment(REPLAN, REPLAN_ROUNDS, seconds)
        return any(now - then < by for now, then, by in zip(now_of(sequence), chosen_at, least, strict=True))

    def _join(self, sequence: Sequence, decoding: Several[Sequence]) -> None:
        """Take over the plan of the requests that are planned together with this one."""
        for other in self._together(sequence, decoding):
            if other is not sequence and other.drafted.chosen_at is not None:
                sequence.drafted.choice = other.drafted.choice
                sequence.drafted.chosen_at = now_of(sequence)
                sequence.drafted.gained_s = 0.0
                sequence.drafted.load = other.drafted.load
                sequence.drafted.trial = other.drafted.trial  # plain decoding is measured only if all decode plainly
                return

    def _choose(self, sequence: Sequence, decoding: Several[Sequence], refresh_every: int) -> None:
        """Choose a plan for this request and those that are planned together with it."""
        together, before = self._together(sequence, decoding), sequence.drafted.choice.plan
        self._fade()
        self._correct()
        load = load_of(decoding)
        for each in filter(loses, together):  # what others have shown does not hold for this text
            each.drafted.trust = MISLED
        situation = self._situation(together, decoding, refresh_every)
        choice = choose(self.candidates, situation, before)
        for each in together:
            each.stats.plan_changes += choice.plan.kind != each.drafted.choice.plan.kind
            each.stats.expected_ms, each.stats.plain_ms = 1e3 * choice.seconds, 1e3 * choice.plain_s
            each.drafted.choice = choice
            each.drafted.chosen_at, each.drafted.load = now_of(each), load.kind
            each.drafted.gained_s = 0.0
        self.latest = f"{len(decoding)} requests, {len(sequence.tokens)} tokens: {choice}"
        self.chosen_for, self.plainly = sequence.request_id, ""
        if choice.plan.kind != before.kind:
            log.info("request %d of %s", sequence.request_id, self.latest)
        if choice.plan.speculates and self._trial_due(choice, load):
            for each in together:  # rounds of micro-batches begin one after another
                each.drafted.trial = TRIAL + situation.costs.groups - 1

    def _trial_due(self, choice: Choice, load: Load) -> bool:
        """Whether to measure plain decoding now. Once this trial has measured a round, only the latest two of the older
        plain rounds still count. Otherwise many old slow rounds would outweigh the new measurement, and speculation
        that does not pay would go on.
        """
        lengths = [then.length for then, _ in self.plain.get(load.kind, ())]
        few = sum(load.length / 2 < length < load.length * 2 for length in lengths) <= 2  # one slow round may mislead
        excess = choice.gain - 1
        interval = load.planned * TRIAL_EVERY * (0.5 if few else min(max(0.5, excess, excess**3), 8.0))
        if self.committed - self.plain_at.get(load.kind, -interval) < interval:
            return False
        # `learn` sets this only when all requests run the same kind of plan. If other requests run other plans,
        # that never happens, and without this line the trial would begin again at the next choice.
        self.plain_at[load.kind] = self.committed
        self.stale.add(load.kind)
        return True

    def _fade(self) -> None:
        """Forget a little of everything, for the tokens since the last time."""
        kept = FADING ** (self.committed - self.faded_at)
        self.faded_at = self.committed
        for known in self.known.values():
            known.fade(kept)
        for learned in (*self.corrections.values(), *chain(*self.usual.values())):
            learned.fade(kept)

    def _correct(self) -> None:
        """Take in the passes and rounds since the last time: done now and then, because fitting takes time."""
        for tier in (self.target, self.retrieval, self.draft):
            tier.fit()
        before: dict[tuple[str, int], tuple[float, float, Usual]] = {}  # what was expected, by kind and load
        # Rounds one after another under the same number of requests are taken together. Their order stays, because
        # later rounds count for more. The lengths of texts hardly change within such a group.
        for _, same in groupby(self.measured, lambda measured: measured.load.requests):
            rounds = [*same]
            costs = self._costs(rounds[0].load)
            all_passes_s = costs.round_s(Round(*np.array([measured.passes for measured in rounds]).T))
            for (kind, load, _, round_s), passes_s in zip(rounds, all_passes_s.tolist(), strict=True):
                if passes_s:
                    if (kind, load.kind) not in before:
                        before[kind, load.kind] = *self._corrected(kind, load.kind), self._usual(load.kind)
                    expected_s = float(corrected_s(passes_s, *before[kind, load.kind]))
                    took_s = min(max(round_s, expected_s / MOST_NEW), expected_s * MOST_NEW)
                    share = 1 / load.planned  # each of these requests has measured the same round
                    self.corrections.setdefault((kind, load.kind), Recent()).add(took_s / passes_s, rounds=share)
                    passes, apart = self.usual.setdefault(load.kind, (Recent(), Recent()))
                    passes.add(passes_s, rounds=share)
                    apart.add(took_s - passes_s, rounds=share)
        self.measured.clear()

    def _situation(self, together: Several[Sequence], decoding: Several[Sequence], refresh_every: int) -> Situation:
        """What one plan is chosen for. The requests' times for cuts add up: one thread cuts all snapshots."""
        load = load_of(decoding)
        cut_s = sum(self.cuts.seconds([whole(s)]) for s in together if not recent_cut(s, refresh_every))
        remaining = fmean(s.spec.max_length - len(s.tokens) for s in together)
        found = {kind: self._corrected(kind, load.kind) for kind in self.candidates.kinds if kind != PLAIN.kind}
        return Situation(
            self._costs(load),
            self._acceptance(together),
            {PLAIN.kind: self._plain_correction(load)} | {kind: corrected for kind, (corrected, _) in found.items()},
            {kind: doubt for kind, (_, doubt) in found.items()},
            self._usual(load.kind),
            cut_s,
            renewal_s=sum(self.renewals.seconds([whole(s)]) for s in together) / refresh_every,
            remaining=max(1, min(HORIZON, int(remaining))),
            by_lookup=not long_in_vain([s.drafted for s in together]),
        )

    def _acceptance(self, together: Several[Sequence]) -> Acceptance:
        for s in together:
            s.drafted.fade(len(s.tokens))
        each = [s.drafted.acceptances.given(self._known(s).given(), s.drafted.trust) for s in together]
        return Acceptance(*map(fmean, zip(*each, strict=True)))

    def _together(self, sequence: Sequence, decoding: Several[Sequence]) -> list[Sequence]:
        """The requests that get the same plan as this one. If tiers have devices of their own, that is this request
        alone. Otherwise it is all requests that are planned here, because on a shared device the drafts of one request
        take time from all.
        """
        if self.tiers.overlapping:
            return [sequence]
        return [s for s in decoding if s.request.lookaheads is None] or [sequence]

    def _known(self, sequence: Sequence) -> Acceptances:
        return self.known.setdefault(round(4 * sequence.spec.sampling.temperature), Acceptances())

    def _corrected(self, kind: str, at_load: int) -> tuple[float, float]:
        """The correction for a kind of plan with drafts, and the weight of `_usual` beside it."""
        found = self.corrections.get((kind, at_load), Recent())
        return found.mean(1.0, ONLY_IF_UNKNOWN), found.doubt

    def _usual(self, at_load: int) -> Usual:
        passes, apart = self.usual.get(at_load, (Recent(), Recent()))
        return Usual(passes.mean(0.0, ONLY_IF_UNKNOWN), apart.mean(0.0))

    def _plain_correction(self, load: Load) -> float:
        """The correction for plain decoding: what its latest rounds took, relative to what their passes should take by
        the present prices. It is the median, because what disturbs rounds only makes them longer; with a 1 among them,
        so that a single slow round says nothing, and of two middle values the lower one.
        """
        seen = [*self.plain.get(load.kind, ())]
        expected_s = self._plain_s([then for then, _ in seen])
        ratios: list[float] = [
            took / passes_s for (_, took), passes_s in zip(seen, expected_s, strict=True) if passes_s
        ]
        return median_low([1.0, *ratios])

    def _batches(self, requests: int) -> tuple[int, int]:
        """The number of requests in a micro-batch, and the number of micro-batches."""
        number = max(1, requests)
        batch = ceil(number / self.tiers.micro_batches)
        return batch, ceil(number / batch)

    def _costs(self, load: Load) -> Costs:
        (batch, groups), tiers, length = self._batches(load.requests), self.tiers, load.length
        together = self.target.alike(batch, length, self._read(batch))
        apart = self.target.alike(batch, length)
        return Costs(
            self._plain_s([load])[0],
            lambda tokens: np.where(tokens <= MOST_QUERIES, together(tokens), apart(tokens)),
            self.retrieval.alike(batch, min(tiers.sparse_tokens, length)),
            self.draft.alike(batch, min(tiers.window_tokens, length)),
            groups,
            tiers.overlapping,
        )

    def _plain_s(self, loads: Several[Load]) -> list[float]:
        """For each load, the seconds of the target's pass over one token of every sequence."""
        requests, lengths = np.array([(load.requests, load.length) for load in loads]).reshape(-1, 2).T
        seconds: list[float] = self.target.alike(requests, lengths, self._read(requests))(1).tolist()
        return seconds

    def _read(self, batch: Floats) -> Floats:
        """What `read` would give for a pass of the target over `batch` sequences."""
        return 1 - self.shared * (1 - 1 / np.maximum(1, batch))


def plan_of(work: Work) -> Plan:
    """The plan of a round of decoding."""
    _, retrieval, draft = work.lookaheads if len(work.lookaheads) == 3 else (1, 0, 0)
    return Plan(retrieval, draft, work.drafting)


def whole(sequence: Sequence) -> Part:
    """A pass over one token, which sees the whole text."""
    return Part(1, len(sequence.tokens))


def now_of(sequence: Sequence) -> Moment:
    return Moment(len(sequence.tokens), sequence.drafted.rounds, sequence.stats.decode_s)


def loses(sequence: Sequence) -> bool:
    """Whether prompt lookup drafts for the target, and its rounds have lost too much since the plan was chosen."""
    drafted = sequence.drafted
    return drafted.choice.plan.by_lookup and drafted.gained_s < -LOSING * drafted.choice.plain_s


def recent_cut(sequence: Sequence, refresh_every: int) -> bool:
    """Whether the latest snapshot is recent enough for the retrieval tier's cache."""
    last = sequence.last_cut
    return last is not None and len(sequence.tokens) - last.position < 2 * refresh_every


def lost_too_much(together: Several[Sequence]) -> bool:
    """Whether speculation has cost these requests more than it may. A plan of prompt lookup alone may cost more, in
    proportion to the gain that it promises: lookup is scored in plain rounds too, so a promised gain means that texts
    repeat themselves.
    """
    choice = together[0].drafted.choice
    promised = choice.gain if choice.plan.by_lookup else 1.0
    share, tokens = LOSS_SHARE * promised, LOSS_TOKENS * min(promised, LOOKUP_TOKENS)
    allowed = sum(share * s.stats.decode_s + tokens * s.drafted.choice.plain_s for s in together)
    return sum(s.drafted.saved_s for s in together) < -allowed


def kind_of_load(requests: int) -> int:
    """A class of loads: 1, 2, 3 to 4, 5 to 8, … requests: full and nearly full servers of usual sizes are in one."""
    return (requests - 1).bit_length()


def load_of(decoding: Several[Sequence]) -> Load:
    planned = sum(s.request.lookaheads is None for s in decoding)
    return Load(len(decoding), planned, sum(len(s.tokens) for s in decoding) / max(1, len(decoding)))
