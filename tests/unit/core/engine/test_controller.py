"""The controller on imagined machines: never slower than plain decoding, and close to the best plan there is."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from statistics import fmean

import numpy as np
import pytest

from triforce_core.engine.acceptances import LONG_AGO, PATIENCE, REQUEST_FADING, TRUST, long_in_vain
from triforce_core.engine.controller import (
    HELD_BACK,
    IN_VAIN,
    MISLED,
    SETTLING,
    TRIAL,
    Controller,
    Tiers,
    load_of,
    lost_too_much,
    now_of,
)
from triforce_core.engine.sequence import Request, Sequence
from triforce_core.kv.folds import MOST_QUERIES
from triforce_core.kv.snapshot import CutRecord
from triforce_core.messages import SCORED, Drafting, Proposal, SamplingParams, SequenceSpec, Span, Tally, Work
from triforce_core.plans import PLAIN, Choice, Plan, plans

LOOKAHEADS = (8, 3)
TIERS = Tiers(LOOKAHEADS, tuple(Drafting), sparse_tokens=1088, window_tokens=252)
REFRESH = 64
PROMPT = 8000
LOOKUP = Plan(0, 8, Drafting.LOOKUP)
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
        self.controller = Controller(replace(TIERS, lookaheads=self.machine.lookaheads))

    def accepted(self, chances: Iterable[float], proposed: int) -> tuple[int, int]:
        """How many of the proposed tokens are accepted, each with its chance, and whether one is rejected."""
        wrong = (n for n, chance in enumerate(islice(chances, proposed)) if self.rng.random() >= chance)
        count = next(wrong, proposed)
        return count, int(count < proposed)

    def looked_up(self, proposed: int) -> tuple[int, int]:
        its = self.machine
        long = its.lookup if its.lookup_long is None else its.lookup_long
        return self.accepted(chain([its.lookup_first], repeat(its.lookup, SCORED - 1), repeat(long)), proposed)

    def draft(self, plan: Plan) -> tuple[int, bool, float]:
        """A draft: its tokens, whether prompt lookup made it, and the seconds it took."""
        found = plan.drafting is not Drafting.MODEL and self.rng.random() < self.machine.found
        if found or plan.drafting is Drafting.LOOKUP:
            return plan.draft * found, found, 0.0
        return plan.draft, False, plan.draft * self.machine.draft

    def below(self, plan: Plan, chance: float, verify_s: float) -> tuple[int, Tally, Tally, float]:
        """One round of drafting and verifying: the tokens added, the tallies of the two levels, the seconds."""
        proposed, looked_up, seconds = self.draft(plan) if plan.draft else (0, False, 0.0)
        accepted, rejected = self.looked_up(proposed) if looked_up else self.accepted(repeat(chance), proposed)
        pass_s = verify_s + proposed * (self.machine.retrieval_token if plan.retrieval else self.machine.target_token)
        pass_s += 0.0 if plan.retrieval or not proposed else self.machine.target_several
        tally = Tally(1, proposed, accepted, rejected, accepted * looked_up, rejected * looked_up, 1, pass_s)
        guess, wrong = self.looked_up(4)
        scored = self.rng.random() < (accepted + 1) / SCORED  # when the text has grown by a guess
        found = self.rng.random() < self.machine.found and scored
        steps = 0 if looked_up or plan.drafting is Drafting.LOOKUP else plan.draft
        leaf = Tally(int(scored), 4 * found, guess * found, wrong * found, passes=steps, busy_s=seconds)
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
        sequence.plan, trace = fixed or self.controller.plan(sequence, [sequence], REFRESH), Trace()
        began = self.clock
        while (done := len(sequence.tokens) - PROMPT) < output:
            if turns and done >= output / 2:
                self.machine = turns
            if machine_at:
                self.machine = machine_at(done)
            trace.append((done, sequence.plan))
            self.clock += self.cut(sequence)
            self.commit(sequence, *self.round(sequence.plan))
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
            sequence.plan = self.controller.plan(sequence, [sequence], REFRESH)

    def cut(self, sequence: Sequence) -> float:
        """The seconds for a snapshot, if one is due."""
        position, last = len(sequence.tokens) - 1, sequence.last_cut
        if not sequence.plan.retrieval or (last and position - last.position < REFRESH):
            return 0.0
        first = last is None or position - last.position >= 2 * REFRESH
        sequence.last_cut = CutRecord(1, position, False)
        seconds = self.machine.cut if first else self.machine.renewal
        self.controller.was_cut(sequence, seconds, first=first)
        return seconds


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
    """After a few requests, decoding is nearly as fast as with the best fixed plan, which may be plain decoding."""
    machine = MACHINES[name]
    servers = [Decoding(machine, rng=random.Random(i)) for i in range(8)]
    took = [[server.request(256)[0] for _ in range(10)][2:] for server in servers]

    def fixed_s(plan: Plan, requests: int = 4) -> float:
        return fmean(Decoding(machine, rng=random.Random(i)).request(256, plan)[0] for i in range(requests))

    promising = sorted(plans(machine.lookaheads, tuple(Drafting)), key=lambda plan: fixed_s(plan, 1))[:10]
    best = min(promising, key=fixed_s)
    assert fmean(map(fmean, took)) <= fixed_s(best, 40) / 0.93
    assert max(map(max, took)) <= fixed_s(PLAIN) / 0.95


def test_a_new_process_decodes_few_rounds_plainly() -> None:
    """The first round is plain because plain decoding has no price yet, and a trial measures it. Then the controller
    tries what may gain.
    """
    trace = Decoding(REPETITIVE).request(24)[1]
    assert [plan.speculates for _, plan in trace[: TRIAL + 2]] == [False] * (TRIAL + 1) + [True]


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


def test_after_a_bad_beginning_lookup_is_tried_again_when_the_text_repeats_itself() -> None:
    """Speculation has used up what it may cost this request. But plain rounds show what lookup promises by now."""
    one, _ = two_requests()
    one.stats.decode_s = 1.0

    def too_much(plan: Plan, promised: float, saved_s: float) -> bool:
        one.drafted.choice, one.drafted.saved_s = Choice(plan, 0.01 / promised, 0.01), saved_s
        return lost_too_much([one])

    for plan, promised in ((LOOKUP, 5.0), (LOOKUP, 1.2), (Plan(0, 8), 5.0), (Plan(8, 3, Drafting.LOOKUP), 5.0)):
        assert not too_much(plan, promised, -0.03)
        assert too_much(plan, promised, -0.3)
        assert too_much(plan, promised, -0.1) is not (plan == LOOKUP and promised == 5.0)


def test_a_request_that_is_held_back_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The log says so once. The request's plan is plain decoding, and its expectation is that of plain decoding."""
    server = Decoding(REPETITIVE)
    server.request(256)
    controller, (one, _) = server.controller, two_requests()
    assert controller.plan(one, [one], REFRESH).speculates
    expected_ms, plain_ms = one.stats.expected_ms, one.stats.plain_ms
    assert expected_ms is not None
    assert plain_ms is not None
    assert expected_ms < plain_ms
    assert HELD_BACK not in controller.figures().latest
    with caplog.at_level("INFO"):
        for saved_s in (-1e3, 0.0, -1e3):
            one.drafted.saved_s = saved_s
            held_back = saved_s < 0
            assert (controller.plan(one, [one], REFRESH) == PLAIN) is held_back
            assert (one.stats.expected_ms == one.stats.plain_ms) is held_back
            assert controller.figures().latest.endswith(HELD_BACK) is held_back
    assert caplog.text.count(HELD_BACK) == 1


def test_the_plan_follows_a_text_that_begins_to_repeat_itself() -> None:
    server = Decoding(UNPREDICTABLE)
    for _ in range(3):
        server.request(256)
    trace = server.request(512, turns=REPETITIVE)[1]
    assert fmean(plan.speculates for done, plan in trace if 128 <= done < 256) < 0.1
    assert all(plan.draft > 4 for done, plan in trace if done >= 256 + 64)


def test_the_plan_follows_a_text_that_stops_repeating_itself() -> None:
    """From 64 tokens after the change on, decoding takes about as long as plain decoding, and prompt lookup pauses; a
    lucky guess may bring it back for a while. These are averages, because drafts may be lucky.
    """

    def after(seed: int) -> tuple[float, float]:
        server = Decoding(REPETITIVE, rng=random.Random(seed))
        for _ in range(3):
            server.request(256)
        trace = server.request(1024, turns=UNPREDICTABLE)[1]
        by_lookup = fmean(plan.by_lookup for done, plan in trace if 512 + 64 <= done < 512 + 128)
        plans = [plan for done, plan in trace if done >= 512 + 64]
        plain_s = Decoding(server.machine).request(448, PLAIN)[0]
        return fmean(sum(server.round(plan)[2] for plan in plans) for _ in range(5)) / plain_s, by_lookup

    relative, by_lookup = map(fmean, zip(*map(after, range(12)), strict=True))
    assert relative <= 1.1
    assert by_lookup <= 0.1


def test_prompt_lookup_is_back_soon_after_a_break() -> None:
    """Of each 260 tokens the first 200 repeat earlier ones. Without pauses, 3.7 s are taken. If each pause forgot what
    the text has shown before, it would be 4.5 s.
    """
    again = REPETITIVE
    free = replace(again, found=0.02, lookup_first=0.3, lookup=0.3, model=0.1, by_target=0.5)

    def seconds(seed: int) -> float:
        server = Decoding(again, rng=random.Random(seed))
        for _ in range(3):
            server.request(256)
        return server.request(1024, machine_at=lambda done: again if done % 260 < 200 else free)[0]

    assert fmean(seconds(seed) for seed in range(8)) <= 4.0


@pytest.mark.parametrize(("tokens", "vain"), [(26, True), (27, False)])
def test_lookup_pauses_after_24_rounds_that_gave_hardly_more_than_24_tokens(tokens: int, vain: bool) -> None:
    """A round by lookup takes at least as long as a plain round, so 24 rounds must give more than 24 / 0.92 tokens. The
    requests of a shared plan are counted together.
    """
    controller = Controller(TIERS)
    both = two_by_lookup(controller)
    for count in [1] * 23 + [tokens - 23]:
        for each in both:
            assert controller.plan(each, both, REFRESH) == LOOKUP
            committed(controller, each, LOOKUP, count)
            committed(controller, each, PLAIN, 1)  # shows nothing of lookup
    for each in both:
        assert controller.plan(each, both, REFRESH) == (PLAIN if vain else LOOKUP)
        assert each.stats.expected_ms == (10.0 if vain else 5.0)
        assert controller.figures().latest.endswith(IN_VAIN) is vain


@pytest.mark.parametrize("which", [0, 1])
def test_a_right_guess_ends_the_pause_at_once_for_all_who_share_the_plan(which: int) -> None:
    controller = Controller(TIERS)
    both = two_by_lookup(controller)
    for each in both:
        each.drafted.lookup_rounds.extend([1] * PATIENCE)
    for guess, paused in ((Tally(1), True), (Tally(1, 4, 0, 1), True), (Tally(1, 4, 1, 1), False)):
        committed(controller, both[which], PLAIN, 1, guess)
        assert [controller.plan(each, both, REFRESH) == PLAIN for each in both] == [paused, paused]
    # A request that takes the place of one has rounds of its own to show what lookup gives.
    one, other = both
    other.drafted.lookup_rounds.extend([1] * PATIENCE)
    one.drafted.lookup_rounds.extend([1] * PATIENCE)
    assert controller.plan(one, both, REFRESH) == PLAIN
    new = two_requests()[1]
    assert controller.plan(new, [one, new], REFRESH) == LOOKUP
    assert controller.plan(one, [one, new], REFRESH) == LOOKUP


def test_in_a_long_pause_another_plan_may_be_chosen() -> None:
    """The text turns into one where lookup finds hardly anything, but the model is nearly always right. Plain decoding
    takes 9.5 s in all. Before lookup paused, 4.5 s were taken.
    """
    turns = replace(REPETITIVE, found=0.05, lookup_first=0.02, lookup=0.1, model=0.85, draft=0.5e-3)

    def request(seed: int) -> tuple[float, float]:
        server = Decoding(REPETITIVE, rng=random.Random(seed))
        for _ in range(3):
            server.request(256)
        seconds, trace = server.request(1024, turns=turns)
        return seconds, fmean(plan.drafting is not Drafting.LOOKUP for done, plan in trace if done >= 512 + 160)

    seconds, others = map(fmean, zip(*map(request, range(6)), strict=True))
    assert seconds <= 4.4
    assert others >= 0.95


def test_a_pause_is_long_from_64_tokens_on_for_all_who_share_the_plan() -> None:
    controller = Controller(TIERS)
    both = two_by_lookup(controller)
    drafted = [each.drafted for each in both]
    for each in both:
        committed(controller, each, PLAIN, 100)
        assert not long_in_vain(drafted)  # lookup was not in vain before
        each.drafted.lookup_rounds.extend([1] * PATIENCE)
    for one, other in ((64, 63), (63, 64), (64, 64)):
        for each, tokens in zip(both, (one, other), strict=True):
            committed(controller, each, LOOKUP, 1)
            committed(controller, each, PLAIN, tokens - 10)
            committed(controller, each, PLAIN, 10)
        assert long_in_vain(drafted) is (one == other)
    committed(controller, both[0], PLAIN, 1, Tally(1, 4, 1, 1))
    assert not long_in_vain(drafted)
    assert both[0].drafted.paused == 0


def two_by_lookup(controller: Controller) -> list[Sequence]:
    """Two requests that have just got a plan of prompt lookup, which promises 5 ms a token instead of 10."""
    both = two_requests()
    for each in both:
        each.drafted.choice = Choice(LOOKUP, 0.005, 0.01)
        each.drafted.chosen_at, each.drafted.load = now_of(each), load_of(both).kind
    controller.chosen_for = both[0].request_id
    return both


def committed(controller: Controller, sequence: Sequence, plan: Plan, tokens: int, guess: Tally | None = None) -> None:
    """A round has given so many tokens, and a guess of prompt lookup was scored."""
    tallies = (Tally(1), Tally(), guess or Tally())
    proposal = answer_of(sequence, tokens, *tallies)
    controller.learn(sequence, proposal, plan, 0.009)


def two_requests() -> list[Sequence]:
    """Two requests beside one another whose prompts were just read."""
    request = Request((1,) * PROMPT, 256, SamplingParams(1.0), 0, None)
    spec = SequenceSpec(request.sampling, 0, PROMPT, PROMPT + 256)
    return [Sequence(n, request, spec, [1] * (PROMPT + 1), prefilled=PROMPT + 1) for n in (1, 2)]


def answer_of(sequence: Sequence, tokens: int, *tallies: Tally) -> Proposal:
    return Proposal(sequence.sequence_id, len(sequence.tokens), (1,) * tokens, b"", tallies=tallies)


@pytest.mark.parametrize("overlapping", [False, True])
def test_requests_that_share_cores_get_one_plan(overlapping: bool) -> None:
    controller = Controller(replace(TIERS, micro_batches=3, overlapping=overlapping))
    one, other = two_requests()
    controller.plan(one, [one, other], REFRESH)
    assert one.drafted.chosen_at == now_of(one)
    assert (other.drafted.choice is one.drafted.choice) is not overlapping
    assert (other.drafted.chosen_at is None) is overlapping


def rounds_with_a_plan(
    controller: Controller, one: Sequence, beside: list[Sequence], round_s: float, tokens: int = 12
) -> int:
    """The rounds until another plan is chosen for the request."""
    choice = one.drafted.choice
    for rounds in range(1, 1000):
        one.drafted.rounds += 1
        one.stats.decode_s += round_s
        one.tokens += [1] * tokens
        one.drafted.trial = 0
        controller.plan(one, [one, *beside], REFRESH)
        if one.drafted.choice is not choice:
            return rounds
    raise AssertionError("no other plan was chosen")


def test_a_plan_stays_for_some_rounds_tokens_and_time() -> None:
    """Choosing must take a small share of the time. Each request has its own clock."""
    controller = Controller(TIERS)
    one, other = two_requests()
    other.drafted.rounds, other.stats.decode_s = 100, 5.0
    controller.plan(one, [one, other], REFRESH)
    for each, beside in ((one, other), (other, one)):
        fast, slow, slow_of_one = (
            rounds_with_a_plan(controller, each, [beside], round_s, tokens)
            for round_s, tokens in ((2e-3, 12), (20e-3, 12), (20e-3, 1))
        )
        assert 1 < slow < slow_of_one < fast


@pytest.mark.parametrize("overlapping", [False, True])
def test_lookup_that_loses_stays_for_a_time_only(overlapping: bool) -> None:
    """It does not wait for tokens. What counts is what a request's rounds have lost since the plan was chosen or
    joined: the time of two plain tokens.
    """
    controller = Controller(replace(TIERS, overlapping=overlapping))
    one, other = two_requests()
    for each, beside in ((one, other), (other, one)):
        controller.plan(one, [one, other], REFRESH)  # chooses for both, or the other one joins
        controller.plan(other, [one, other], REFRESH)
        seen = []
        for plan, lost_s in ((LOOKUP, 0.0199), (LOOKUP, 0.0201), (Plan(0, 8), 1.0)):
            each.drafted.choice = Choice(plan, 0.005, 0.01)
            each.drafted.gained_s -= lost_s
            seen.append(rounds_with_a_plan(controller, each, [beside], 20e-3, 1))
            assert each.drafted.gained_s == 0
        assert 1 < seen[1] < seen[0] == seen[2]


def test_where_each_request_has_a_plan_of_its_own_all_plans_stay_longer() -> None:
    """One thread chooses for all requests. Requests that set their lookaheads do not count, because nothing is chosen
    for them.
    """
    controller = Controller(replace(TIERS, overlapping=True))
    one, other = two_requests()
    pinned = replace(other, request=replace(other.request, lookaheads=(0, 0)))
    seen = []
    for beside in ([pinned], [other], [other, pinned]):
        controller.plan(one, [one, *beside], REFRESH)
        rounds_with_a_plan(controller, one, beside, 2e-3)  # of a choice for another load
        seen.append(rounds_with_a_plan(controller, one, beside, 2e-3))
    assert seen[1] == seen[2] == pytest.approx(2 * seen[0], abs=1)


def test_a_request_that_lookup_has_misled_believes_less_of_what_others_have_shown() -> None:
    """The next choice takes this into account. For a request beside it whose rounds have not lost nothing changes."""
    controller = Controller(TIERS)
    one, other = two_requests()
    for lost_s, plan, trust in (
        (0.0199, LOOKUP, TRUST),
        (0.0201, Plan(0, 8), TRUST),
        (0.0201, LOOKUP, MISLED),
        (0.0201, LOOKUP, MISLED),
    ):
        controller.plan(one, [one, other], REFRESH)
        one.drafted.choice = other.drafted.choice = Choice(plan, 0.005, 0.01)
        one.drafted.gained_s, one.drafted.chosen_at, one.drafted.trial = -lost_s, LONG_AGO, 0
        controller.plan(one, [one, other], REFRESH)
        assert (one.drafted.trust, other.drafted.trust) == (trust, TRUST)


def test_what_a_request_has_shown_fades_with_its_tokens_even_if_it_joined_others() -> None:
    controller = Controller(TIERS)
    one, other = two_requests()
    controller.plan(one, [one, other], REFRESH)
    controller.plan(other, [one, other], REFRESH)
    guess = (Tally(1), Tally(), Tally(1, 4, 4))
    for tallies in (guess, (Tally(1),), (Tally(1),), guess):
        other.tokens += [1] * 5
        proposal = answer_of(other, 5, *tallies)
        controller.learn(other, proposal, PLAIN, 0.01)
    found = other.drafted.acceptances.chances["found"]
    assert found.times == pytest.approx(1 + REQUEST_FADING**15)
    other.tokens += [1] * 5
    other.drafted.chosen_at = LONG_AGO
    for _ in range(2):  # once for these tokens, however often a plan is chosen
        controller.plan(other, [one, other], REFRESH)
        assert found.times == pytest.approx(REQUEST_FADING**5 + REQUEST_FADING**20)
    assert controller.known[4].chances["found"].times > 1.95, "the server forgets more slowly"


def test_rounds_that_the_retrieval_tier_drafts_alone_teach_how_much_of_it_is_accepted() -> None:
    """Its answers have no tally of the draft tier."""
    controller = Controller(TIERS)
    one, _ = two_requests()
    controller.plan(one, [one], REFRESH)
    controller.learn(one, answer_of(one, 3, Tally(1, 3, 2, 1), Tally(3)), Plan(3, 0), 0.01)
    for known in (one.drafted.acceptances, controller.known[4]):
        assert (known.chances["retrieval"].happened, known.chances["retrieval"].times) == (2, 3)


def test_for_all_who_share_a_choice_or_join_it_gains_are_counted_anew() -> None:
    controller = Controller(TIERS)
    one, other = two_requests()
    one.drafted.gained_s = other.drafted.gained_s = -1.0
    controller.plan(one, [one, other], REFRESH)
    assert (one.drafted.gained_s, other.drafted.gained_s) == (0, 0)
    other.drafted.chosen_at, other.drafted.gained_s = None, -1.0  # as when it was preempted
    controller.plan(other, [one, other], REFRESH)
    assert other.drafted.choice is one.drafted.choice
    assert other.drafted.gained_s == 0


def test_what_a_plan_has_gained_is_counted_by_its_rounds() -> None:
    """Neither the cost of beginning nor the limit on savings is part of it. A hiccup counts as the time of three
    tokens.
    """
    controller = Controller(TIERS)
    one, _ = two_requests()
    controller.plan(one, [one], REFRESH)
    one.drafted.choice = Choice(LOOKUP, 0.005, 0.01)
    one.drafted.unpaid_s, one.drafted.saved_s, one.drafted.gained_s = 1.0, 0.16, 0.0
    tallies = (Tally(1, 8, 2, 1, 2, 1), Tally(), Tally())
    for round_s, gained_s in ((0.1, 0.0), (0.01, 0.02), (0.01, 0.04), (5.0, 0.01)):
        proposal = answer_of(one, 3, *tallies)
        controller.learn(one, proposal, one.drafted.choice.plan, round_s)
        assert one.drafted.gained_s == pytest.approx(gained_s)


@pytest.mark.parametrize("overlapping", [False, True])
def test_a_preempted_request_joins_the_others_or_chooses(overlapping: bool) -> None:
    controller = Controller(replace(TIERS, overlapping=overlapping))
    one, other = two_requests()
    other.drafted.rounds, other.stats.decode_s = 100, 5.0
    for each in (one, other):
        controller.plan(each, [one, other], REFRESH)
    other.drafted.choice, again = Choice(PLAIN, 0.0, 0.01), one.again(3)
    before = again.drafted.choice
    controller.plan(again, [again, other], REFRESH)
    assert again.drafted.choice is not before
    assert (again.drafted.choice is other.drafted.choice) is not overlapping
    assert rounds_with_a_plan(controller, again, [other], 20e-3, 1) > 1


@pytest.mark.parametrize("requests", [1, 2])
def test_unlucky_drafts_are_no_overhead_of_their_plan(requests: int) -> None:
    """Prompt lookup finds nothing in one round and eight tokens in the next: each takes what its passes take."""
    controller, plan = Controller(TIERS), LOOKUP
    sequences = two_requests()[:requests]
    for clock, proposed in enumerate([0, 8] * 10, 1):
        counts = [proposed, 0][:requests]  # the second request finds nothing, and shares the pass
        seconds = 10e-3 * requests + 1e-3 * sum(counts)
        answers = []
        for each, count in zip(sequences, counts, strict=True):
            each.work = Work(Span(each.sequence_id, PROMPT, (1,)), (1, *plan.lookaheads), drafting=plan.drafting)
            tally = Tally(1, count, 0, int(count > 0), 0, 0, 1, seconds)
            answers.append((each, Proposal(each.sequence_id, PROMPT, (1,), b"", tallies=(tally,))))
        controller.passed(answers, sequences, float(clock))
        for each, proposal in answers:
            each.clock = clock + 1.0
            controller.learn(each, proposal, plan, seconds)
    controller._correct()
    assert controller.figures().corrections["lookup"] == pytest.approx(1, abs=0.05)


def test_a_lacking_round_makes_no_pass_larger() -> None:
    """Below the target there were two rounds of three proposed tokens each. One of them lacked something and had no
    pass, so the one pass was over three tokens.
    """
    tallies = (Tally(1, 4, 4, passes=1), Tally(2, 6, 3, passes=1), Tally())
    passes = Controller(TIERS)._round(Proposal(1, PROMPT, (1,) * 5, b"", tallies=tallies), Plan(8, 3))
    assert (passes.passes, passes.verified) == (1, 3)


@pytest.mark.parametrize("beside", [Plan(0, 2), Plan(8, 3), PLAIN], ids=str)
def test_rounds_beside_other_kinds_of_plans_correct_nothing(beside: Plan) -> None:
    """The reason is that a plain round takes longer beside a round that drafts."""
    controller = Controller(TIERS)
    one, other = sequences = two_requests()
    for each, plan in ((one, Plan(0, 3)), (other, beside)):
        each.work = Work(Span(each.sequence_id, PROMPT, (1,)), (1, *plan.lookaheads))
    tally = Tally(1, 3, 1, 1, 0, 0, 1, 0.02)
    answers = [(each, Proposal(each.sequence_id, PROMPT + 1, (1, 1), b"", tallies=(tally,))) for each in sequences]
    for now in (1.0, 2.0):
        controller.passed(answers, sequences, now)
    one.clock = 2.0
    controller.learn(one, answers[0][1], Plan(0, 3), 0.5)
    assert bool(controller.measured) is (beside == Plan(0, 2))


def test_a_new_load_gets_a_new_plan() -> None:
    """The plan is chosen at once, because what paid for one request may cost several."""
    controller = Controller(TIERS)
    one, other = two_requests()
    controller.plan(one, [one], REFRESH)
    assert (one.drafted.load, other.drafted.load) == (0, -1)
    controller.plan(other, [one, other], REFRESH)
    assert one.drafted.load == other.drafted.load == 1
    one.drafted.rounds = 1
    controller.plan(one, [one, other], REFRESH)
    assert one.drafted.rounds == 1, "the plan of this load is still new"
    one.drafted.trial = 2
    controller.plan(one, [one], REFRESH)
    assert one.drafted.load == 0, "also while plain decoding is measured"


def rounds(
    controller: Controller,
    decoding: list[Sequence],
    planned: int,
    took: list[float],
    plan: Plan = PLAIN,
    pass_s: float = 0.01,
    below: tuple[Tally, ...] = (),
) -> None:
    """Run rounds of one plan one after another, whose passes take `pass_s` seconds. The first `planned` requests are
    planned here. `below`: the tallies of the tiers below, the same in each round.
    """
    for round_s in took:
        answers = []
        for each in decoding:
            each.clock += round_s
            each.work = Work(Span(each.sequence_id, PROMPT, (1,)), (1, *plan.lookaheads))
            tally = Tally(1, plan.draft, 0, int(plan.draft > 0), busy_s=pass_s)
            answers.append((each, Proposal(each.sequence_id, PROMPT, (1,), b"", tallies=(tally, *below))))
        controller.passed(answers, decoding, decoding[0].clock)
        for each, proposal in answers[:planned]:
            controller.learn(each, proposal, plan, round_s)


@pytest.mark.parametrize(("planned", "pinned"), [(1, 0), (2, 0), (1, 1)])
def test_a_round_corrects_the_same_however_many_requests_share_it(planned: int, pinned: int) -> None:
    """Ten slow rounds follow many rounds that took as long as their passes should."""
    controller = Controller(TIERS)
    decoding = two_requests()[: planned + pinned]
    for each in decoding[planned:]:
        each.request = replace(each.request, lookaheads=(0, 3))
    rounds(controller, decoding, planned, [0.01] * 50, Plan(0, 3))
    controller._correct()
    rounds(controller, decoding, planned, [0.02] * 10, Plan(0, 3))
    controller._correct()
    assert controller.figures().corrections["model"] == pytest.approx(2 - 0.9**10, abs=0.05)


def test_rounds_of_several_loads_are_each_measured_against_their_own_passes() -> None:
    """One request drafts, then a second one beside it, then the first one alone again; nothing is learned in between.
    Passes over two requests take twice as long, and so do rounds.
    """
    controller, plan = Controller(TIERS), Plan(0, 3)
    decoding = two_requests()
    for requests in (1, 2, 1):
        took = 0.01 * requests
        rounds(controller, decoding[:requests], requests, [took] * 20, plan, pass_s=took)
    controller._correct()
    for load in (0, 1):
        assert controller.corrections[plan.kind, load].mean(1.0) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("took", [[0.01, 0.01, 0.3, 0.01], [0.01, 0.3]], ids=["among three", "alone"])
@pytest.mark.parametrize("planned", [1, 2])
@pytest.mark.parametrize("plan", [PLAIN, Plan(0, 3)], ids=str)
def test_a_single_slow_round_says_little_even_where_few_are_known(plan: Plan, planned: int, took: list[float]) -> None:
    """A hiccup of the machine made it thirty times as long; its pass was as fast as ever. The first round is not
    counted, because other kinds of rounds may have been under way when it began. Nor are the first `SETTLING` plain
    rounds.
    """
    controller = Controller(TIERS)
    settling = [] if plan.speculates else [0.02] * (SETTLING - 1)
    rounds(controller, two_requests()[:planned], planned, settling + took, plan)
    controller._correct()
    correction = controller.figures().corrections[plan.kind]
    assert correction < (1.4 if len(took) > 2 else 2.0)
    assert correction > 1.0 if plan.speculates else correction == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("planned", [1, 2])
def test_rounds_that_wait_for_a_snapshot_are_not_what_plain_decoding_takes(planned: int) -> None:
    """Tiers that share cores hand the snapshot over during these rounds, so they take twice as long."""
    controller = Controller(TIERS)
    decoding = two_requests()[:planned]
    for _ in range(10):
        rounds(controller, decoding, planned, [0.01] * 2)
        decoding[-1].plan_waits = True
        rounds(controller, decoding, planned, [0.02] * 2)
        decoding[-1].plan_waits = False
    assert controller._plain_correction(load_of(decoding)) == pytest.approx(1, abs=0.05)


def test_plain_rounds_count_once_they_are_typical() -> None:
    """After rounds with drafts, tiers finish what they had begun: the first plain rounds take twice as long."""
    controller = Controller(TIERS)
    decoding = two_requests()[:1]
    for _ in range(3):
        rounds(controller, decoding, 1, [0.01] * 4, Plan(0, 3))
        rounds(controller, decoding, 1, [0.02] * SETTLING + [0.01] * 2)
    assert [took for _, took in controller.plain[0]] == [0.01] * 6


@pytest.mark.parametrize(("overlapping", "price_s"), [(False, 5e-3), (True, 10e-3)])
def test_passes_at_the_same_time_on_shared_cores_are_taken_for_their_share_of_it(
    overlapping: bool, price_s: float
) -> None:
    """Rounds take 10 ms, and so does their pass. With two micro-batches that means that two passes are always under
    way. On shared cores they slow each other down, and one alone would take 5 ms.
    """
    controller = Controller(replace(TIERS, micro_batches=2, overlapping=overlapping))
    decoding, plan = two_requests(), Plan(0, 3)
    rounds(controller, decoding, 2, [0.01] * 100, plan)
    controller._correct()
    assert controller.target.alike(2, PROMPT)(1 + plan.draft) == pytest.approx(price_s, rel=0.05)
    rounds(controller, decoding[:1], 1, [0.01] * 100, plan)
    controller._correct()
    assert controller.target.alike(1, PROMPT)(1 + plan.draft) == pytest.approx(10e-3, rel=0.05), "nothing overlaps"


def test_passes_of_all_tiers_are_taken_for_their_share_of_the_time() -> None:
    """Of two micro-batches, each has 10 ms of passes in 10 ms: the target's, one of retrieval, two of the model."""
    controller = Controller(replace(TIERS, micro_batches=2))
    below = (Tally(1, 3, 1, 1, passes=1, busy_s=4e-3), Tally(passes=2, busy_s=2e-3))
    rounds(controller, two_requests(), 2, [0.01] * 100, Plan(2, 3), pass_s=4e-3, below=below)
    controller._correct()
    for costs, keys, tokens, price_s in (
        (controller.target, PROMPT, 4, 2e-3),
        (controller.retrieval, TIERS.sparse_tokens, 4, 2e-3),
        (controller.draft, TIERS.window_tokens, 1, 0.5e-3),
    ):
        assert costs.alike(1, keys)(tokens) == pytest.approx(price_s, rel=0.1)


def test_that_passes_overlap_is_remembered_while_requests_come_and_go() -> None:
    """Passes over two requests take 20 ms, because two overlap all the time; those over one take 10 ms."""
    controller, plan = Controller(replace(TIERS, micro_batches=2)), Plan(0, 3)
    decoding = two_requests()
    for _ in range(30):
        rounds(controller, decoding, 2, [0.02] * 3, plan, pass_s=0.02)
        rounds(controller, decoding[:1], 1, [0.01] * 3, plan)
    controller._correct()
    for batch in (1, 2):
        assert controller.target.alike(batch, PROMPT)(1 + plan.draft) == pytest.approx(10e-3, rel=0.05)


def test_slow_rounds_of_a_new_kind_count_in_full_where_such_are_usual() -> None:
    """Rounds of all kinds take 2.5 times as long as their passes."""
    controller = Controller(TIERS)
    decoding = two_requests()[:1]
    for _ in range(5):
        rounds(controller, decoding, 1, [0.025] * 20, Plan(0, 3))
        controller._correct()
    rounds(controller, decoding, 1, [0.025] * 10, Plan(1, 3))
    controller._correct()
    for kind in ("model", "retrieval+model"):
        assert controller.figures().corrections[kind] > 2.3


def test_plain_decoding_is_measured_seldom_where_a_plan_gains_much_and_it_is_well_known() -> None:
    """A gain of four times may be due to a single slow round; that is measured again soon."""
    controller = Controller(TIERS)
    load = load_of(two_requests()[:1])

    def interval(gain: float, known: int = 16, length: int = PROMPT) -> int:
        """The tokens after which plain decoding is measured again."""
        controller.plain[load.kind] = deque([(load, 0.01)] * known)
        choice, now = Choice(Plan(8, 3), 0.01, 0.01 * gain), load._replace(length=length)
        for committed in range(10_000):
            controller.plain_at[load.kind], controller.committed = 100, 100 + committed
            if controller._trial_due(choice, now):
                return committed
        raise AssertionError("it is never measured")

    often, *rest = [interval(gain) for gain in (1.1, 1.5, 1.8, 2, 2.5, 3, 9)]
    assert 50 < often == rest[0] < rest[1] < rest[2] < rest[3] < rest[4] == rest[5] < 5000
    for little in (interval(4, known=0), interval(4, known=2), interval(4, length=3 * PROMPT)):
        assert little == often
    assert interval(4, known=3) > often


def test_of_a_kind_that_was_not_tried_what_is_usual_is_expected() -> None:
    """Rounds of one kind took 14 ms where their passes take 10 ms."""
    controller = Controller(TIERS)
    decoding = two_requests()[:1]
    rounds(controller, decoding, 1, [0.014] * 100, Plan(0, 3))
    controller._correct()
    situation = controller._situation(decoding, decoding, REFRESH)
    assert situation.doubts["retrieval"] == 1.0
    assert situation.doubts["model"] < 0.1
    assert situation.corrections["model"] == pytest.approx(1.4, abs=0.05)
    assert situation.usual.seconds(np.array([0.01, 0.03])) == pytest.approx([0.014, 0.034], abs=5e-4)


def test_what_a_snapshot_takes_follows_the_length_of_the_text() -> None:
    """The first cuts of a server are of short texts, and slow."""
    controller = Controller(TIERS)
    one, _ = two_requests()

    def cut(length: int, seconds: float, *, first: bool) -> None:
        one.tokens = [1] * length
        controller.was_cut(one, seconds, first=first)

    def expected_s(length: int) -> tuple[float, float]:
        one.tokens = [1] * length
        situation = controller._situation([one], [one], REFRESH)
        return situation.cut_s, situation.renewal_s * REFRESH

    cut(65, 5e-3, first=True)
    cut(4700, 21e-3, first=True)
    cut(4760, 17e-3, first=False)
    assert expected_s(4760) == pytest.approx((21e-3, 17e-3), rel=0.05)
    assert expected_s(65) == pytest.approx((5e-3, 0), abs=1e-3), "not seen yet, so the price is not taken to be fixed"
    assert expected_s(9400) == pytest.approx((37e-3, 34e-3), rel=0.1)


def test_what_a_load_has_shown_is_kept_when_the_load_changes() -> None:
    """Requests that come and go around a power of two change it every few rounds."""
    controller = Controller(TIERS)
    one, other = two_requests()
    for _ in range(10):
        rounds(controller, [one, other], 2, [0.02] * 4)
        controller.plan(one, [one], REFRESH)
        rounds(controller, [one], 1, [0.01] * 4)
        controller.plan(one, [one, other], REFRESH)
    for decoding, took in (([one], 1), ([one, other], 2)):
        assert controller._plain_correction(load_of(decoding)) == pytest.approx(took, abs=0.1)


def test_a_trial_is_shared_by_those_who_join_and_ends_with_a_choice() -> None:
    controller = Controller(TIERS)
    one, other = two_requests()
    plain = Choice(PLAIN, 0.0, 0.0)
    one.stats.decoded = 10
    controller.plan(one, [one], REFRESH)
    one.drafted.choice, one.drafted.trial = plain, 2
    controller.plan(other, [one], REFRESH)  # the load is the one of the choice
    assert other.drafted.trial == 1, "two rounds are left, and this is the first"
    controller.plan(one, [one], REFRESH)
    assert one.drafted.choice is plain
    controller.plan(one, [one], REFRESH)
    controller.plan(one, [one], REFRESH)
    assert one.drafted.choice is not plain, "chosen again after the last round"


def test_slow_rounds_of_long_ago_do_not_outlive_the_next_measurement() -> None:
    """Plain decoding was slow for a while, so speculation seems to pay. When plain decoding is measured again, the new
    figures count.
    """
    machine = replace(UNPREDICTABLE, model=0.15)  # with 0.35, drafts of one token would break even
    server = Decoding(machine)
    for _ in range(4):
        server.request(256)
    [at_load] = server.controller.plain
    seen = server.controller.plain[at_load]
    server.controller.plain[at_load] = deque(((load, 2 * round_s) for load, round_s in seen), seen.maxlen)
    trace = server.request(512)[1]
    assert trace[40][1].speculates, "at first this is believed"
    assert not any(plan.speculates for done, plan in trace if done >= 448)


def test_a_pass_that_reads_a_prompt_teaches_nothing() -> None:
    controller = Controller(TIERS)
    _, other = sequences = two_requests()
    other.prefilled = 0
    answers = [
        (each, Proposal(each.sequence_id, PROMPT, (1,), b"", tallies=(Tally(1, busy_s=1),))) for each in sequences
    ]
    for each in sequences:
        each.work = Work(Span(each.sequence_id, PROMPT, (1,)), (1, 0, 0))
    controller.passed(answers, sequences, 1.0)
    assert not controller.target.few.known
    controller.passed(answers[:1], sequences, 2.0)
    assert controller.target.few.known


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("shared", [0.0, 0.3, 0.6])
def test_keys_that_requests_share_are_expected_to_be_read_once(micro_batches: int, shared: float) -> None:
    """A plain round reads them once for all requests, and a speculative round once for each micro-batch."""
    latest = 1.0
    controller = Controller(replace(TIERS, micro_batches=micro_batches), lambda: latest)
    sequences = [each for _ in range(3) for each in two_requests()]

    def reads(rows: int) -> float:
        return 1 - shared * (1 - 1 / rows)

    def seconds(rows: int, read: float) -> float:
        return 2e-3 + 1e-6 * rows * PROMPT * read

    for rows, count in 10 * [(rows, count) for rows in (1, 6, 3, 2) for count in (0, 4)]:
        latest = reads(rows)
        tally = Tally(1, count, count, 0, 0, 0, 1, seconds(rows, latest))
        answers = [(each, Proposal(each.sequence_id, PROMPT, (1,), b"", tallies=(tally,))) for each in sequences[:rows]]
        controller.passed(answers, sequences, 1.0)
    controller._correct()
    costs, rows = controller._costs(load_of(sequences)), 6 // micro_batches
    assert costs.plain_s == pytest.approx(seconds(6, reads(6)), rel=0.1)
    assert costs.target(5) == pytest.approx(seconds(rows, reads(rows)), rel=0.1)
    assert costs.target(MOST_QUERIES + 1) >= 0.9 * seconds(rows, 1), "with so many queries nothing is read once"


def test_requests_that_pin_their_plans_leave_nothing_behind() -> None:
    server = Decoding(Machine())
    for _ in range(3):
        server.request(64, Plan(8, 3))
    controller = server.controller
    assert not controller.known
    assert not controller.measured
    assert not controller.rounds
    assert controller.target.few.known, "but what passes take is known"
