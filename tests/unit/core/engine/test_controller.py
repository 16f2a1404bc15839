"""The controller on imagined machines: never slower than plain decoding, and close to the best plan there is."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice, repeat
from statistics import fmean

import pytest

from triforce_core.engine.acceptances import Acceptances
from triforce_core.engine.controller import HELD_BACK, LOSS, LOSS_SHARE, REPLAN, Controller
from triforce_core.engine.sequence import Request, Sequence
from triforce_core.kv.snapshot import CutRecord
from triforce_core.messages import SCORED, Drafting, Proposal, SamplingParams, SequenceSpec, Span, Tally, Work
from triforce_core.plans import PLAIN, Plan, halves

LOOKAHEADS = (8, 3)
REFRESH = 64
PROMPT = 8000
Trace = list[tuple[int, Plan]]


@dataclass(frozen=True)
class Machine:
    """What passes take, in seconds, and what is accepted. The defaults are like two CPU cores at 8K tokens."""

    target: float = 8e-3  # a pass
    target_token: float = 1.1e-3  # each token in it
    target_several: float = 0.0  # a pass over more than one token, beyond that
    retrieval: float = 6e-3
    retrieval_token: float = 0.5e-3
    draft: float = 1.2e-3
    round_s: float = 0.2e-3  # of any round, such as a link
    speculative_s: float = 0.0  # of a round in which the tiers below take part
    cut: float = 0.05
    renewal: float = 4e-3
    by_target: float = 0.95  # a token of retrieval
    model: float = 0.55
    lookup_first: float = 0.6
    lookup: float = 0.6
    lookup_long: float | None = None  # of tokens after the fourth; None: as `lookup`
    found: float = 0.3
    lookaheads: tuple[int, int] = LOOKAHEADS  # the most tokens that are drafted


@dataclass
class Decoding:
    """Requests decoded one after another on a machine, as the engine drives the controller."""

    machine: Machine
    controller: Controller = field(init=False)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    clock: float = 0.0
    ids: int = 0

    def __post_init__(self) -> None:
        self.controller = Controller(self.machine.lookaheads, tuple(Drafting))

    def accepted(self, chances: Iterable[float], proposed: int) -> tuple[int, int]:
        """How many of the proposed tokens are accepted, each with its chance, and whether one is rejected."""
        wrong = (n for n, chance in enumerate(islice(chances, proposed)) if self.rng.random() >= chance)
        count = next(wrong, proposed)
        return count, int(count < proposed)

    def looked_up(self, proposed: int) -> tuple[int, int]:
        its = self.machine
        long = its.lookup if its.lookup_long is None else its.lookup_long
        return self.accepted(chain([its.lookup_first], repeat(its.lookup, SCORED - 1), repeat(long)), proposed)

    def draft(self, plan: Plan, chance: float) -> tuple[int, bool, float]:
        """A draft: its tokens, whether prompt lookup made it, and the seconds it took. The model knows the chance of
        its tokens, and runs no pass that is not worth it.
        """
        found = plan.drafting is not Drafting.MODEL and self.rng.random() < self.machine.found
        if found or plan.drafting is Drafting.LOOKUP:
            return plan.draft * found, found, 0.0
        steps = next((n for n in range(1, plan.draft) if chance ** (n + 1) < plan.least_gain), plan.draft)
        return steps, False, steps * self.machine.draft

    def below(self, plan: Plan, chance: float, verify_s: float) -> tuple[int, Tally, Tally, float]:
        """One round of drafting and verifying: the tokens added, the tallies of the two levels, the seconds."""
        proposed, looked_up, seconds = self.draft(plan, chance) if plan.draft else (0, False, 0.0)
        accepted, rejected = self.looked_up(proposed) if looked_up else self.accepted(repeat(chance), proposed)
        pass_s = verify_s + proposed * (self.machine.retrieval_token if plan.retrieval else self.machine.target_token)
        pass_s += 0.0 if plan.retrieval or not proposed else self.machine.target_several
        drafts = int(proposed > 0 and not looked_up)
        tally = Tally(1, proposed, accepted, rejected, accepted * looked_up, rejected * looked_up, 1, pass_s, drafts)
        guess, wrong = self.looked_up(4)
        scored = self.rng.random() < (accepted + 1) / SCORED  # when the text has grown by a guess
        found = self.rng.random() < self.machine.found and scored
        steps = 0 if looked_up or plan.drafting is Drafting.LOOKUP else proposed
        counted = int(scored), 4 * found, guess * found, wrong * found
        leaf = Tally(*counted, passes=steps, busy_s=seconds)
        return accepted + 1, tally, leaf, seconds + pass_s

    def round(self, plan: Plan) -> tuple[int, tuple[Tally, ...], float]:
        """A round of a plan: its tokens, its tallies, the seconds."""
        machine = self.machine
        if not plan.retrieval:
            tokens, tally, leaf, seconds = self.below(plan, machine.model, machine.target + machine.target_token)
            extra = machine.round_s + machine.speculative_s * plan.speculates
            return tokens, (tally, Tally(), leaf), seconds + extra
        block, below, leaf, seconds = 0, Tally(), Tally(), 0.0
        while block < plan.retrieval:
            more, tally, drafts, took = self.below(plan, machine.model, machine.retrieval + machine.retrieval_token)
            block, below, leaf, seconds = block + more, below + tally, leaf + drafts, seconds + took
        accepted, rejected = self.accepted(repeat(machine.by_target), block)
        pass_s = machine.target + (block + 1) * machine.target_token + machine.target_several
        target = Tally(1, block, accepted, rejected, 0, 0, 1, pass_s)
        return accepted + 1, (target, below, leaf), seconds + pass_s + machine.round_s + machine.speculative_s

    def request(
        self,
        output: int,
        fixed: Plan | None = None,
        turns: Machine | None = None,
        machine_at: Callable[[int], Machine] | None = None,
    ) -> tuple[float, Trace]:
        """Run a request whose plans are the controller's, or one fixed plan. Return its seconds, and its plans by
        tokens of output. In the middle the machine becomes `turns`, or `machine_at` gives it for each token of output.
        """
        self.ids += 1
        request = Request((1,) * PROMPT, output, SamplingParams(1.0), 0, fixed.lookaheads if fixed else None)
        spec = SequenceSpec(request.sampling, 0, PROMPT, PROMPT + output)
        sequence = Sequence(self.ids, request, spec, [1] * (PROMPT + 1), clock=self.clock, prefilled=PROMPT + 1)
        sequence.plan, trace = fixed or self.controller.plan([sequence]), Trace()
        began = self.clock
        while (done := len(sequence.tokens) - PROMPT) < output:
            if turns and done >= output / 2:
                self.machine = turns
            if machine_at:
                self.machine = machine_at(done)
            trace.append((done, sequence.plan))
            tokens, tallies, seconds = self.round(sequence.plan)
            self.commit(sequence, tokens, tallies, self.cut(sequence) + seconds)
        return self.clock - began, trace

    def commit(self, sequence: Sequence, tokens: int, tallies: tuple[Tally, ...], seconds: float) -> None:
        """What the engine does with an answer of the target."""
        self.clock += seconds
        sequence.clock = self.clock
        proposal = Proposal(sequence.sequence_id, len(sequence.tokens), (1,) * tokens, b"", tallies=tallies)
        span, plan = Span(sequence.sequence_id, len(sequence.tokens) - 1, (1,)), sequence.plan
        sequence.work = Work(span, (1, *plan.lookaheads), drafting=plan.drafting)
        self.controller.passed([(sequence, proposal)], [sequence], self.clock)
        sequence.work = None
        sequence.tokens += [1] * tokens
        sequence.stats.decoded += tokens
        sequence.stats.decode_s += seconds
        if sequence.request.lookaheads is None:
            self.controller.learn(sequence, proposal, sequence.plan, seconds)
            sequence.plan = self.controller.plan([sequence])

    def cut(self, sequence: Sequence) -> float:
        """The seconds by which a snapshot makes a round longer: those of one that renews another. For a first one the
        clock goes on, and the controller is told.
        """
        position, last = len(sequence.tokens) - 1, sequence.last_cut
        if not sequence.plan.retrieval or (last and position - last.position < REFRESH):
            return 0.0
        first = last is None or position - last.position >= 2 * REFRESH
        sequence.last_cut = CutRecord(1, position, False)
        if not first:
            return self.machine.renewal
        self.clock += self.machine.cut
        self.controller.was_cut(sequence, self.machine.cut)
        return 0.0


MACHINES = {
    "like two cores": Machine(),
    "unpredictable": Machine(by_target=0.4, model=0.05, lookup_first=0.1, lookup=0.1, found=0.05),
    "short context": Machine(target=4e-3, target_token=0.8e-3),
    "slow links": Machine(speculative_s=30e-3),
    "long context": Machine(target=40e-3, target_token=2e-3, cut=0.3),
    "a GPU at 128K": Machine(30e-3, 0.05e-3, 8e-3, 0.05e-3, 0.5e-3, cut=0.05, by_target=0.92),
    "products that cost more than their tokens": Machine(target=14e-3, target_several=10e-3, by_target=0.9),
    "offloaded": Machine(target=1.0, target_token=1e-3, by_target=0.9, lookaheads=(16, 3)),
    "repetitive": Machine(by_target=0.97, model=0.9, lookup_first=0.97, lookup=0.97, found=0.95),
    "drafts that are wrong at once or right for long": Machine(model=0.3, lookup_first=0.5, lookup=0.95, found=0.6),
    "drafts that go on once they have begun": Machine(
        6e-3, 0.3e-3, 2e-3, model=0.3, lookup_first=0.7, lookup=0.65, lookup_long=0.97, found=0.65
    ),
    "a costly first snapshot": Machine(cut=2.0),
}

REPETITIVE, UNPREDICTABLE = MACHINES["repetitive"], MACHINES["unpredictable"]


@pytest.mark.parametrize("name", MACHINES)
def test_speculation_pays_or_is_off(name: str) -> None:
    """After a few requests, decoding is nearly as fast as with the best fixed plan, which may be plain decoding. A
    single request may lose what trials cost.
    """
    machine = MACHINES[name]
    servers = [Decoding(machine, rng=random.Random(i)) for i in range(8)]
    took = [[server.request(256)[0] for _ in range(10)][2:] for server in servers]

    def fixed_s(plan: Plan, requests: int = 4) -> float:
        return fmean(Decoding(machine, rng=random.Random(i)).request(256, plan)[0] for i in range(requests))

    drafts = [(n, drafting) for n in (1, 2, 3, 4, 8, 11) for drafting in Drafting]
    every = {PLAIN} | {
        Plan(above, n, drafting) for above in (0, *halves(machine.lookaheads[0])) for n, drafting in drafts
    }
    promising = sorted(every, key=lambda plan: fixed_s(plan, 1))[:10]
    best = min(promising, key=fixed_s)
    average_s, plain_s = fmean(map(fmean, took)), fixed_s(PLAIN)
    assert average_s <= fixed_s(best, 40) / 0.87
    assert average_s <= plain_s / 0.97
    assert max(map(max, took)) <= plain_s / 0.87


def test_a_new_process_decodes_few_rounds_plainly() -> None:
    """The first two, because plain decoding has no price yet. Then the controller tries what may gain."""
    trace = Decoding(REPETITIVE).request(24)[1]
    assert [plan.speculates for _, plan in trace[:3]] == [False, False, True]


WRONG_LOOKUP = replace(REPETITIVE, by_target=0.4, model=0.05, lookup_first=0.05, found=0.6)
RIGHT_LOOKUP = Machine(
    14e-3, 0.9e-3, 0.0, 4e-3, 0.3e-3, model=0.35, lookup_first=0.9, lookup=0.95, found=0.65, by_target=0.95
)
ONE_RIGHT = Machine(14e-3, model=0.1, lookup_first=0.7, lookup=0.05, found=0.9)


@pytest.mark.parametrize(
    ("before", "learned", "after", "output", "seeds", "gain"),
    [
        # A server that expects much and gets little stops speculating within the loss that is allowed.
        (UNPREDICTABLE, 0, UNPREDICTABLE, [256], 1, 0.85),
        # In the next text prompt lookup finds much, and is always wrong at once.
        (REPETITIVE, 4, WRONG_LOOKUP, [64], 1, 0.75),
        (REPETITIVE, 4, WRONG_LOOKUP, [256], 1, 0.9),
        # In the next texts the first token of lookup is nearly always wrong. A plan with a retrieval tier is the best
        # there, 1.97 times as fast as plain decoding.
        (RIGHT_LOOKUP, 6, replace(RIGHT_LOOKUP, lookup_first=0.15, lookup=0.5, found=0.5), [256, 256], 8, 1.6),
        # Drafts of one token do not show that later tokens are right by now. Guesses do.
        (ONE_RIGHT, 6, replace(ONE_RIGHT, lookup_first=0.9, lookup=0.97), [256], 24, 3.5),
    ],
    ids=["unlucky beginning", "surprise", "longer surprise", "another plan", "one token"],
)
def test_another_kind_of_text_costs_little_or_soon_gains(
    before: Machine, learned: int, after: Machine, output: list[int], seeds: int, gain: float
) -> None:
    """The server has decoded texts of one kind; then come others. Bounds are relative to plain decoding."""

    def seconds(seed: int) -> float:
        server = Decoding(before, rng=random.Random(seed))
        for _ in range(learned):
            server.request(256)
        server.machine = after
        return fmean(server.request(count)[0] for count in output)

    assert fmean(map(seconds, range(seeds))) <= Decoding(after).request(output[0], PLAIN)[0] / gain


def two_requests() -> list[Sequence]:
    """Two requests beside one another whose prompts were just read."""
    request = Request((1,) * PROMPT, 256, SamplingParams(1.0), 0, None)
    spec = SequenceSpec(request.sampling, 0, PROMPT, PROMPT + 256)
    return [Sequence(n, request, spec, [1] * (PROMPT + 1), clock=0.0, prefilled=PROMPT + 1) for n in (1, 2)]


def test_a_request_that_is_held_back_says_so() -> None:
    server = Decoding(REPETITIVE)
    server.request(256)
    controller, [one, _] = server.controller, two_requests()
    assert controller.plan([one]).speculates
    assert HELD_BACK not in controller.figures().latest
    for saved in (-1e3, 0.0):
        one.drafted.saved = saved
        server.clock += 1
        controller.passed([], [one], server.clock)
        assert (controller.plan([one]) == PLAIN) is (saved < 0)
        assert controller.figures().latest.endswith(HELD_BACK) is (saved < 0)


def test_what_is_lost_beside_a_request_that_pins_another_plan_counts() -> None:
    """These rounds say nothing of prices, but whoever waits for them has lost the time."""
    it, both = controller(), two_requests()
    both[1].request = replace(both[1].request, lookaheads=(0, 0))
    rounds(it, both, [0.01] * 10)
    rounds(it, both, [0.04] * 6, Plan(0, 3), beside=PLAIN)
    assert not it.figures().corrections
    assert both[0].drafted.saved < -LOSS


def test_a_request_that_joins_within_a_pass_is_taken_into_account() -> None:
    """The same pass gave another request's tokens, for which a plan was made already."""
    it, both = controller(), two_requests()
    rounds(it, both[:1], [0.01] * 3)
    it.plan(both[:1])
    chosen = it.choice
    it.plan(both)
    assert it.choice is not chosen


def test_a_preempted_request_begins_to_draft_anew() -> None:
    """The tiers hold nothing of it any more, so its next round is no ordinary one."""
    [one, _] = two_requests()
    it, drafts = controller(), Plan(0, 3)
    rounds(it, [one], [0.01] * 3)
    rounds(it, [one], [0.01] * 3, drafts)
    known = it.figures().corrections
    again = one.again(7)
    rounds(it, [again], [0.5], drafts)
    assert it.figures().corrections == known


@pytest.mark.parametrize("plan", [Plan(8, 3), Plan(8, 3, Drafting.LOOKUP), Plan(0, 3)], ids=str)
def test_waiting_for_a_tier_that_does_not_answer_counts_as_a_loss(plan: Plan) -> None:
    it, [one, _] = controller(), two_requests()
    rounds(it, [one], [0.01] * 10)
    nothing = Proposal(1, PROMPT, (1,), b"", tallies=(Tally(1, passes=1, busy_s=0.01), Tally(), Tally()))
    saved = one.drafted.saved
    for _ in range(3):
        one.clock += 10
        one.work = Work(Span(1, PROMPT, (1,)), (1, *plan.lookaheads), drafting=plan.drafting)
        it.passed([(one, nothing)], [one], one.clock)
        it.learn(one, nothing, plan, 10.0)
    assert one.drafted.saved == pytest.approx(saved - 3 * 3, abs=0.1), "as much as four plain rounds for each token"
    assert not it.figures().corrections, "it says nothing of the plan"


def test_a_hiccup_with_drafts_does_not_end_them() -> None:
    """Whether it is one of the first rounds or a later one that takes a hundred times as long, its passes too."""
    for slow in ({0, 1}, {5}):
        server = Decoding(REPETITIVE)
        undisturbed, drafted = server.round, count()

        def disturbed(
            plan: Plan, undisturbed: Callable = undisturbed, drafted: Iterator[int] = drafted, slow: set[int] = slow
        ) -> tuple[int, tuple[Tally, ...], float]:
            tokens, tallies, seconds = undisturbed(plan)
            if plan.speculates and next(drafted) in slow:
                return tokens, tuple(each._replace(busy_s=100 * each.busy_s) for each in tallies), 100 * seconds
            return tokens, tallies, seconds

        server.round = disturbed  # type: ignore[method-assign]
        for _ in range(3):
            server.request(256)
        assert server.request(256)[0] <= Decoding(REPETITIVE).request(256, PLAIN)[0] / 3


def after_the_turn(before: Machine, turns: Machine, seed: int, output: int) -> tuple[float, float]:
    """A text turns into one of another kind in the middle of its output: what each half takes, without the 64 tokens
    after the turn, relative to plain decoding.
    """
    server = Decoding(before, rng=random.Random(seed))
    for _ in range(3):
        server.request(256)
    trace, middle = server.request(output, turns=turns)[1], output // 2
    plain_s = Decoding(before).request(middle, PLAIN)[0] / middle  # a token, on either

    def relative(machine: Machine, since: int, until: int) -> float:
        server.machine = machine
        its = [plan for done, plan in trace if since <= done < until]
        return fmean(sum(server.round(plan)[2] for plan in its) for _ in range(5)) / plain_s / (until - since)

    return relative(before, 0, middle), relative(turns, middle + 64, output)


def test_the_plan_follows_a_text_that_begins_to_repeat_itself() -> None:
    free, repetitive = map(
        fmean, zip(*(after_the_turn(UNPREDICTABLE, REPETITIVE, n, 512) for n in range(8)), strict=True)
    )
    assert free <= 1.05
    assert repetitive <= 1 / 3


def test_the_plan_follows_a_text_that_stops_repeating_itself() -> None:
    repetitive, free = map(
        fmean, zip(*(after_the_turn(REPETITIVE, UNPREDICTABLE, n, 1024) for n in range(8)), strict=True)
    )
    assert repetitive <= 1 / 3
    assert free <= 1.1


def test_prompt_lookup_is_back_soon_after_a_break() -> None:
    """Of each 260 tokens the first 200 repeat earlier ones. If each break made the controller forget what the text
    has shown before, it would take 4.5 s.
    """
    again = REPETITIVE
    free = replace(again, found=0.02, lookup_first=0.3, lookup=0.3, model=0.1, by_target=0.5)

    def seconds(seed: int) -> float:
        server = Decoding(again, rng=random.Random(seed))
        for _ in range(3):
            server.request(256)
        return server.request(1024, machine_at=lambda done: again if done % 260 < 200 else free)[0]

    assert fmean(seconds(seed) for seed in range(8)) <= 4.0


def rounds(
    controller: Controller,
    decoding: list[Sequence],
    took: list[float],
    plan: Plan = PLAIN,
    beside: Plan | None = None,
    pass_s: float = 0.01,
) -> None:
    """Rounds of one plan one after another, whose passes take `pass_s` seconds; the last request has the plan `beside`.
    A request that pins its lookaheads teaches nothing.
    """
    for round_s in took:
        answers = []
        for each in decoding:
            each.clock += round_s
            its = beside if beside is not None and each is decoding[-1] else plan
            each.work = Work(Span(each.sequence_id, PROMPT, (1,)), (1, *its.lookaheads), drafting=its.drafting)
            tally = Tally(1, its.draft, 0, int(its.draft > 0), passes=1, busy_s=pass_s)
            answers.append((each, Proposal(each.sequence_id, PROMPT, (1,), b"", tallies=(tally,))))
        controller.passed(answers, decoding, decoding[0].clock)
        for each, proposal in answers:
            if each.request.lookaheads is None:
                controller.learn(each, proposal, plan, round_s)


def controller() -> Controller:
    return Controller(LOOKAHEADS, tuple(Drafting))


def plain_ms(it: Controller) -> float:
    return 1e3 * it._times(it.load).plain_s.given(0.0, 0.0)


def test_all_requests_that_are_planned_get_one_plan_at_once_when_the_load_changes() -> None:
    """What paid for one request may cost several."""
    it, [one, other] = controller(), two_requests()
    rounds(it, [one], [0.01] * 3)
    it.plan([one])
    chosen = it.choice
    for _ in range(REPLAN - 1):
        rounds(it, [one], [0.01])
        it.plan([one])
        assert it.choice is chosen, "for some tokens it stays"
    for decoding in ([one, other], [one]):  # one comes, and leaves
        it.passed([], decoding, it.passed_at + 0.01)
        it.plan(decoding)
        assert it.choice is not chosen
        chosen = it.choice


@pytest.mark.parametrize("took", [[0.01] * 3 + [0.3, 0.01], [0.01] * 3 + [0.3]])
@pytest.mark.parametrize("count", [1, 2])
def test_a_single_slow_round_says_little(count: int, took: list[float]) -> None:
    """A hiccup of the machine made it thirty times as long."""
    it = controller()
    rounds(it, two_requests()[:count], took)
    assert 10 < plain_ms(it) < 15


@pytest.mark.parametrize(("count", "pinned"), [(1, 0), (2, 0), (2, 1)])
def test_a_round_counts_the_same_however_many_requests_share_it(count: int, pinned: int) -> None:
    it, decoding = controller(), two_requests()[:count]
    for each in decoding[count - pinned :]:
        each.request = replace(each.request, lookaheads=(0, 0))
    rounds(it, decoding, [0.01] * 50)
    rounds(it, decoding, [0.015] * 5)
    weight = 0.9**5 if not pinned else 0.9**2.5
    assert plain_ms(it) == pytest.approx(15 - 5 * weight, abs=0.2)


def test_rounds_beside_other_kinds_of_plans_say_nothing_of_times() -> None:
    """A plain round takes longer beside a round that drafts."""
    it, both = controller(), two_requests()
    rounds(it, both, [0.01] * 10)
    rounds(it, both, [0.02] * 10, beside=Plan(0, 3))
    assert plain_ms(it) == pytest.approx(10)
    rounds(it, both, [0.02] * 10, Plan(0, 3), beside=PLAIN)
    assert not it.figures().corrections


def test_rounds_that_wait_for_a_snapshot_or_come_after_drafts_are_not_what_plain_decoding_takes() -> None:
    """Tiers that share cores hand the snapshot over, or finish what they had begun, during these rounds."""
    it, [one, _] = controller(), two_requests()
    for _ in range(10):
        rounds(it, [one], [0.01] * 2)
        one.plan_waits = True
        rounds(it, [one], [0.02] * 2)
        one.plan_waits = False
    rounds(it, [one], [0.02] * 2, Plan(0, 3))
    rounds(it, [one], [0.02])
    assert plain_ms(it) == pytest.approx(10)


@pytest.mark.parametrize("drafting", [Drafting.MODEL, Drafting.BOTH])
def test_drafts_of_the_model_are_told_from_those_of_lookup(drafting: Drafting) -> None:
    """Of ten drafts of a block three were the model's: they took 12 passes, and 6 of their tokens were accepted."""
    it, [one, _] = controller(), two_requests()
    rounds(it, [one], [0.01] * 2)
    below, leaf = Tally(10, 40, 26, 9, 20, 6, drafts=3), Tally(passes=12)
    for _ in range(300):
        answer = Proposal(1, PROMPT, (1,) * 4, b"", tallies=(Tally(1, 8, 3, 1), below, leaf))
        it.learn(one, answer, Plan(8, 3, drafting), None)
    known = it.known[4].given()
    assert known.steps_below == pytest.approx(4, abs=0.1)
    assert known.accepted_below == pytest.approx(2, abs=0.1)
    assert known.steps == Acceptances().given().steps, "the target verified none"
    unverified = Tally(1, 4), Tally(passes=3)  # the retrieval tier lacked a snapshot
    it.learn(one, Proposal(1, PROMPT, (1,), b"", tallies=(Tally(1), *unverified)), Plan(8, 3, drafting), None)
    assert it.known[4].given() == known


def test_a_round_that_a_prompt_delayed_says_what_was_accepted_and_nothing_of_times() -> None:
    it, [one, _] = controller(), two_requests()
    rounds(it, [one], [0.01] * 2)
    tallies = Tally(1, 3, 3, drafts=1), Tally(), Tally(passes=3)
    it.learn(one, Proposal(1, PROMPT, (1,) * 4, b"", tallies=tallies), Plan(0, 3), None)
    assert it.known[4].chances["accepted"].happened == 3
    assert one.drafted.saved == pytest.approx(2 * LOSS_SHARE), "of the plain rounds"


def test_what_a_load_has_shown_is_kept_when_the_load_changes() -> None:
    """Requests that come and go around a power of two change it every few rounds."""
    it, both = controller(), two_requests()
    for _ in range(10):
        rounds(it, both, [0.02] * 4)
        rounds(it, both[:1], [0.01] * 4)
    assert plain_ms(it) == pytest.approx(10, rel=0.01)
    rounds(it, both, [0.02])
    assert plain_ms(it) == pytest.approx(20, rel=0.01)


def test_plain_decoding_is_measured_again_where_a_plan_is_in_force() -> None:
    """Plain decoding was slow for a while, so speculation seems to pay. When it is measured again, that counts."""
    server = Decoding(UNPREDICTABLE)
    for _ in range(4):
        server.request(256)
    for times in server.controller.times.values():
        times.plain_s.total *= 2
    trace = server.request(512)[1]
    assert any(plan.speculates for done, plan in trace if done < 128), "at first this is believed"
    assert not any(plan.speculates for done, plan in trace if done >= 448)


def test_requests_that_pin_their_plans_leave_nothing_behind() -> None:
    server = Decoding(Machine())
    for _ in range(3):
        server.request(64, Plan(8, 3))
    assert not server.controller.known
    assert not server.controller.rounds
    assert not server.controller.times
