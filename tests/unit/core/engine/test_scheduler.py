"""Who goes live, who is preempted, and how a pass is shared: the scheduler by itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.by_hand import Slots
from triforce_core.costs import Part, PassCosts
from triforce_core.engine.scheduler import CHUNK_AT_FIRST, CHUNK_UNIT, Scheduler
from triforce_core.engine.sequence import Request, Sequence
from triforce_core.messages import GREEDY, SequenceSpec, Work

CHUNK, STEP = 8, 2


def sequence(
    sequence_id: int,
    prompt: int,
    *,
    max_tokens: int = 4,
    resume: int = 0,
    priority: int = 0,
    lookaheads: tuple[int, int] = (4, 2),
) -> Sequence:
    tokens = list(range(prompt + resume))
    request = Request(
        tuple(tokens[:prompt]), max_tokens, GREEDY, 0, lookaheads, resume=tuple(tokens[prompt:]), priority=priority
    )
    return Sequence(sequence_id, request, SequenceSpec(GREEDY, 0, prompt, prompt + max_tokens), tokens)


def scheduler_of(
    *sequences: Sequence,
    free: int = 10_000,
    max_sequences: int = 8,
    chunk: int = CHUNK,
    costs: PassCosts | None = None,
    max_stall_s: float = math.inf,
    longest_block: int = 0,
) -> Scheduler:
    scheduler = Scheduler(
        Slots(free),
        max_sequences=max_sequences,
        prefill_chunk=chunk,
        costs=costs,
        max_stall_s=max_stall_s,
        step_ahead=STEP,
        longest_block=longest_block,
    )
    for each in sequences:
        scheduler.add(each)
    scheduler.admit()
    return scheduler


def slots(scheduler: Scheduler) -> Slots:
    assert isinstance(scheduler.kv, Slots)
    return scheduler.kv


def end(scheduler: Scheduler, sequence_id: int) -> None:
    """End a live request as the engine does."""
    scheduler.remove(scheduler.live[sequence_id])
    slots(scheduler).release(sequence_id)


def answered(scheduler: Scheduler, work: list[Work]) -> None:
    """Answer prompt chunks as the engine does: the target then holds what it was told."""
    for w in work:
        live = scheduler.live[w.span.sequence_id]
        live.work, live.prefilled = None, w.span.end


def decode(sequence: Sequence, num_tokens: int = 1) -> None:
    """Make this a request whose prompt is read, with `num_tokens` tokens more."""
    sequence.tokens += [7] * num_tokens
    sequence.prefilled, sequence.work = len(sequence.tokens) - 1, None


def chunks_of(work: list[Work]) -> list[Work]:
    """The work for prompts, for which no tier below the target is asked anything."""
    return [w for w in work if not any(w.lookaheads[1:])]


def spans(work: list[Work]) -> list[tuple[int, int, int]]:
    return sorted((w.span.sequence_id, w.span.start, w.span.end) for w in work)


# -- chunks ------------------------------------------------------------------------------------------------------------


def test_the_prompt_chunks_of_a_pass_share_one_budget() -> None:
    """The shortest prompt comes first. If each request had a budget, a pass would grow with the number of requests."""
    scheduler = scheduler_of(sequence(1, 20), sequence(2, 3), sequence(3, 9))
    expected = [
        [(2, 0, 3)],  # the next chunk, of 8 tokens, does not fit beside it
        [(3, 0, 8)],
        [(3, 8, 9)],
        [(1, 0, 8)],
        [(1, 8, 16)],
        [(1, 16, 20)],
        [],
    ]
    for passed, wanted in enumerate(expected):
        chunks = chunks_of(scheduler.next_work())
        assert spans(chunks) == wanted, f"pass {passed}"
        answered(scheduler, chunks)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=8))
def test_every_prompt_is_told_once_and_in_order(lengths: list[tuple[int, int]]) -> None:
    """Resumed output is told with the prompt. While a prompt is left, no pass is without a chunk."""
    scheduler = scheduler_of(*(sequence(i, n, resume=r) for i, (n, r) in enumerate(lengths, 1)))
    told = [0] * (1 + len(lengths))
    whole = [0, *(n + r for n, r in lengths)]
    while told != whole:
        chunks = chunks_of(scheduler.next_work())
        sizes = [len(w.span.tokens) for w in chunks]
        assert 0 < sum(sizes) <= CHUNK
        assert 0 not in sizes
        for w in chunks:
            sequence_id = w.span.sequence_id
            assert w.span.start == told[sequence_id]
            assert (w.span.spec is not None) == (w.span.start == 0)
            told[sequence_id] = w.span.end
            last = w.span.end == whole[sequence_id]
            assert last or len(w.span.tokens) % CHUNK == 0
            assert (w.sample, w.lookaheads) == ((True, (1, 0, 0)) if last else (False, (1,)))
        answered(scheduler, chunks)


@given(st.integers(10, 60), st.lists(st.tuples(st.integers(0, 12), st.integers(1, 30)), max_size=12))
def test_no_prompt_is_passed_for_ever(first: int, others: list[tuple[int, int]]) -> None:
    """Other prompts arrive while the first one is read. A pass leaves the first one out only if prompts before it leave
    too little room for its next chunk. A prompt is before it if the tokens handed out before that prompt went live,
    plus that prompt's own tokens, are at most the tokens of the first one.
    """
    scheduler = scheduler_of(sequence(1, first), max_sequences=100)
    arrivals = sorted(others)
    went_live: dict[int, int] = {}
    for passed in range(200):
        while arrivals and arrivals[0][0] <= passed:
            scheduler.add(sequence(100 - len(arrivals), arrivals.pop(0)[1]))
        scheduler.admit()
        went_live |= {i: scheduler.told for i in scheduler.live if i not in went_live}
        left = first - scheduler.live[1].prefilled
        chunks = chunks_of(scheduler.next_work())
        sizes = {w.span.sequence_id: len(w.span.tokens) for w in chunks}
        if 1 not in sizes:
            before = [size for i, size in sizes.items() if went_live[i] + scheduler.live[i].given <= first]
            assert CHUNK - sum(before) < min(CHUNK, left)
        answered(scheduler, chunks)
        if not scheduler.live[1].prefilling:
            break
    assert not scheduler.live[1].prefilling


def test_priority_comes_before_length() -> None:
    scheduler = scheduler_of(sequence(1, 4), sequence(2, 20, priority=-1), sequence(3, 4, priority=1))
    told: list[int] = []
    while any(s.prefilling for s in scheduler.live.values()):
        chunks = chunks_of(scheduler.next_work())
        told += [w.span.sequence_id for w in chunks]
        answered(scheduler, chunks)
    assert list(dict.fromkeys(told)) == [2, 1, 3]


def test_decoding_waits_for_no_prompt() -> None:
    """Rounds take nothing of the budget, and go out beside any number of prompt chunks."""
    scheduler = scheduler_of(sequence(1, 16), sequence(2, 2), sequence(3, 18))
    decode(scheduler.live[2])
    work = scheduler.next_work()
    assert spans(work) == [(1, 0, 8), (2, 0, 3)], "of the third's prompt there is no room"
    [round_] = [w for w in work if w.span.sequence_id == 2]
    assert round_.lookaheads == (1, 4, 2)
    assert round_.sample


def test_a_request_that_waits_for_an_answer_is_asked_nothing() -> None:
    scheduler = scheduler_of(sequence(1, 20), sequence(2, 30))
    first = scheduler.next_work()
    assert spans(first) == [(1, 0, 8)]
    assert spans(scheduler.next_work()) == [(2, 0, 8)], "the budget goes to who can use it"
    assert scheduler.next_work() == []
    answered(scheduler, first)
    assert spans(scheduler.next_work()) == [(1, 8, 16)]


# -- chunks bounded in time --------------------------------------------------------------------------------------------


def costing(fixed_ms: float, token_ms: float, pair_us: float = 0.0) -> PassCosts:
    """Costs that were learned from passes of many sizes at these prices."""
    costs = PassCosts()
    for tokens in (64, 128, 512, 2048):
        for before in (0, 1000, 8000, 32_000):
            pairs = tokens * (before + (tokens + 1) / 2)
            costs.add([Part(tokens, before)], (fixed_ms + token_ms * tokens + 1e-3 * pair_us * pairs) / 1e3)
    return costs


NEW, USUAL, LONG = PassCosts(), costing(fixed_ms=5, token_ms=0.1), costing(fixed_ms=5, token_ms=0.1, pair_us=0.01)
STALLS: dict[str, tuple[PassCosts | None, list[int], dict[str, float], list[int]]] = {
    # costs, prompts, how long the stall may be and what of it is used up, the tokens of each prompt's chunk
    "5 ms + .1 ms a token": (LONG, [50_000], {"max_stall_s": 0.105}, [928]),
    "short": (LONG, [50_000], {"max_stall_s": 0.030}, [192]),
    "long": (LONG, [50_000], {"max_stall_s": 10.0}, [2048]),
    "and .3 ms a token for the 32,000 before it": (LONG, [50_000], {"max_stall_s": 0.105, "prefilled": 32_000}, [224]),
    "never less": (LONG, [50_000], {"max_stall_s": 0.001, "prefilled": 32_000}, [64]),
    # A chunk of less than 500 tokens would take more for the pass, whose KV is copied to the device, than for itself.
    "never mostly fixed cost": (costing(fixed_ms=100, token_ms=0.2), [50_000], {"max_stall_s": 0.03}, [544]),
    # As much as 200 tokens take is fixed cost.
    "a small rest of the stall": (costing(20, 0.1), [9000], {"max_stall_s": 0.1, "stalled_s": 0.07}, [0]),
    "a larger rest": (costing(20, 0.1), [9000], {"max_stall_s": 0.1, "stalled_s": 0.05}, [256]),
    "a prompt smaller than the least chunk": (costing(50, 0.1), [200], {"max_stall_s": 0.3, "stalled_s": 0.1}, [200]),
    # If rounds take a second by themselves, chunks get half a second, however short the stall may be.
    "rounds of a second": (costing(5, 0.5), [9000], {"max_stall_s": 0.1, "round_s": 1.0}, [990]),
    # 50 ms are 450 tokens: a short prompt and as much of a long one as there is time for.
    "several prompts": (USUAL, [5000, 100], {"max_stall_s": 0.05}, [320, 100]),
    "before the first pass": (NEW, [5000], {"max_stall_s": 0.5}, [CHUNK_AT_FIRST]),
    "several before the first pass": (NEW, [100, 5000], {"max_stall_s": 0.5}, [100, CHUNK_AT_FIRST - 100]),
    "off": (None, [9000], {"max_stall_s": math.inf, "stalled_s": 100.0}, [2048]),
}


@pytest.mark.parametrize("name", STALLS)
def test_a_chunk_takes_as_long_as_a_stall_may_last(name: str) -> None:
    """Of the stall of another request, which is being decoded."""
    costs, prompts, stall, wanted = STALLS[name]
    both = [sequence(1, 5), *(sequence(i, prompt) for i, prompt in enumerate(prompts, 2))]
    scheduler = scheduler_of(*both, free=100_000, chunk=2048, costs=costs, max_stall_s=stall["max_stall_s"])
    decoding = scheduler.live[1]
    decode(decoding)
    decoding.stalled_s, decoding.round_s = stall.get("stalled_s", 0.0), stall.get("round_s", 0.0)
    scheduler.live[2].prefilled = int(stall.get("prefilled", 0))
    chunks = {w.span.sequence_id: len(w.span.tokens) for w in scheduler.next_work() if w.span.sequence_id > 1}
    found = [chunks.get(i, 0) for i in range(2, 2 + len(prompts))]
    assert found == pytest.approx(wanted, abs=CHUNK_UNIT / 2)
    assert [each > 0 for each in found] == [each > 0 for each in wanted]


def test_while_nobody_decodes_chunks_are_whole() -> None:
    scheduler = scheduler_of(sequence(1, 5000), chunk=2048, costs=costing(5, 0.1), max_stall_s=0.01)
    assert spans(scheduler.next_work()) == [(1, 0, 2048)]


def test_the_stall_is_that_of_a_round() -> None:
    """A round of decoding may outlast several passes with chunks, which share the round's stall. The next round has a
    new stall.
    """
    costs = costing(fixed_ms=5, token_ms=0.1)
    scheduler = scheduler_of(
        sequence(1, 5), sequence(2, 9000), free=100_000, chunk=2048, costs=costs, max_stall_s=0.105
    )
    decoding = scheduler.live[1]
    decode(decoding)
    first = scheduler.next_work()
    assert spans(chunks_of(first)) == [(2, 0, 960)]
    answered(scheduler, chunks_of(first))
    assert scheduler.next_work() == [], "the round is still out, and its stall is used up"
    decoding.stalled_s = 0.050
    later = scheduler.next_work()
    assert spans(later) == [(2, 960, 960 + 448)]
    answered(scheduler, later)
    decode(decoding)
    decoding.stalled_s = 0.0
    assert spans(chunks_of(scheduler.next_work())) == [(2, 1408, 1408 + 960)]


def test_a_short_prompt_does_not_wait_for_a_long_one_behind_it() -> None:
    """Two streams answer in turn, so that one of them always has a stall behind it. A pass has much fixed cost, and the
    short prompt is smaller than the least chunk.
    """
    costs = costing(fixed_ms=50, token_ms=0.1)
    scheduler = scheduler_of(
        sequence(1, 5), sequence(2, 5), sequence(3, 90_000), free=200_000, chunk=2048, costs=costs, max_stall_s=0.3
    )
    for stream in (1, 2):
        decode(scheduler.live[stream])
    turns = 0
    for turn in range(20):
        if turn == 5:
            scheduler.add(sequence(4, 200))
            scheduler.admit()
        work = scheduler.next_work()
        answered(scheduler, chunks_of(work))
        stream = scheduler.live[1 + turn % 2]
        decode(stream)
        stream.stalled_s = 0.0
        if turn >= 5 and scheduler.live[4].prefilling:
            turns += 1
    assert turns <= 4


def test_prompts_whose_logprobs_are_asked_share_the_room_of_their_logits() -> None:
    scored = [sequence(i, 3000) for i in (1, 2)]
    for each in scored:
        each.spec = replace(each.spec, prompt_logprobs=1)
    scheduler = Scheduler(Slots(100_000), max_sequences=8, prefill_chunk=2048, scored_chunk=640)
    for each in (*scored, sequence(3, 3000)):
        scheduler.add(each)
    scheduler.admit()
    assert spans(scheduler.next_work()) == [(1, 0, 640), (3, 0, 1408)]


def test_the_least_stall_is_told() -> None:
    """With 32,000 tokens before it, a chunk of 64 tokens takes 5 ms and .42 ms for each token."""
    scheduler = scheduler_of(costs=costing(fixed_ms=5, token_ms=0.1, pair_us=0.01))
    assert scheduler.least_stall_s(32_000) == pytest.approx(0.032, rel=0.1)
    assert scheduler_of().least_stall_s(32_000) == 0


# -- who goes live -----------------------------------------------------------------------------------------------------


def test_a_request_goes_live_with_room_for_its_prompt_and_a_step() -> None:
    """Its greatest length does not matter, unless it is shorter."""
    scheduler = scheduler_of(sequence(1, 50, max_tokens=1000), sequence(2, 40, max_tokens=1), free=100)
    assert list(scheduler.live) == [1, 2]
    assert slots(scheduler).free == 100 - 52 - 41


def test_requests_go_live_by_priority_and_then_in_turn() -> None:
    scheduler = scheduler_of(
        sequence(1, 5), sequence(2, 5, priority=3), sequence(3, 5, priority=-1), sequence(4, 5), max_sequences=1
    )
    served = []
    while scheduler.live:
        [live] = scheduler.live
        served.append(live)
        end(scheduler, live)
        scheduler.admit()
    assert served == [3, 1, 4, 2]


def test_smaller_requests_pass_one_that_does_not_fit_but_not_for_ever() -> None:
    """They pass until they have as many tokens together as the waiting request. Then it is the next to go live."""
    scheduler = scheduler_of(sequence(1, 50), sequence(2, 58), free=100)
    assert list(scheduler.live) == [1]
    for small in range(3, 20):
        scheduler.add(sequence(small, 10))
    passed = []
    for _ in range(20):
        scheduler.admit()
        small = [i for i in scheduler.live if i > 2]
        passed += small
        for each in small:
            end(scheduler, each)
    assert passed == [3, 4, 5, 6, 7], "60 tokens with their steps, as the one that waits"
    end(scheduler, 1)
    scheduler.admit()
    assert 2 in scheduler.live


def test_no_more_than_so_many_are_live() -> None:
    scheduler = scheduler_of(*(sequence(i, 5) for i in range(1, 6)), max_sequences=2)
    assert list(scheduler.live) == [1, 2]
    end(scheduler, 1)
    scheduler.admit()
    assert list(scheduler.live) == [2, 3]


def test_a_request_can_be_taken_out_wherever_it_is() -> None:
    """It can be taken out once: a request that is gone, or never was there, is not found."""
    scheduler = scheduler_of(sequence(1, 5), sequence(2, 5), sequence(3, 5), max_sequences=1)
    for request_id in (2, 1):
        found = scheduler.find(request_id)
        assert found is not None
        assert found.request_id == request_id
        scheduler.remove(found)
    assert [scheduler.find(i) for i in (1, 2, 9)] == [None] * 3
    scheduler.admit()
    assert list(scheduler.live) == [3]
    assert slots(scheduler).opened == [1, 3], "what never went live took no room"


# -- who is preempted --------------------------------------------------------------------------------------------------


def preempted(scheduler: Scheduler, new_id: int) -> int | None:
    """Preempt as the engine does: the request that has to go, whose id this returns, waits again."""
    if (victim := scheduler.to_preempt()) is None:
        return None
    end(scheduler, victim.sequence_id)
    scheduler.add(victim.again(new_id))
    return victim.request_id


def test_requests_grow_while_there_is_room() -> None:
    scheduler = scheduler_of(sequence(1, 10, max_tokens=100, lookaheads=(4, 2)), free=30)
    decode(scheduler.live[1], 3)
    assert scheduler.to_preempt() is None
    assert slots(scheduler).owned[1] == 10 + 3 + 4 + 2 + 1, "its tokens, and the longest block"


def test_there_is_room_for_drafts_of_an_earlier_plan() -> None:
    """The retrieval tier runs ahead with the plan that it knows, and the next one may be shorter."""
    scheduler = scheduler_of(sequence(1, 10, max_tokens=100, lookaheads=(0, 0)), free=30, longest_block=11)
    decode(scheduler.live[1], 3)
    assert scheduler.to_preempt() is None
    assert slots(scheduler).owned[1] == 10 + 3 + 11 + 1


def test_a_request_that_waits_for_its_snapshot_decodes_plainly() -> None:
    scheduler = scheduler_of(sequence(1, 10, max_tokens=100))
    live = scheduler.live[1]
    decode(live, 1)
    live.plan_waits = True
    [work] = scheduler.next_work()
    assert work.lookaheads == (1, 0, 0)
    live.work, live.plan_waits = None, False
    [work] = scheduler.next_work()
    assert work.lookaheads == (1, 4, 2)


def test_a_request_that_is_not_asked_needs_no_room() -> None:
    scheduler = scheduler_of(sequence(1, 10, max_tokens=100), free=12)
    scheduler.next_work()
    assert scheduler.to_preempt() is None


def test_the_youngest_makes_room_and_comes_back_with_room_for_all() -> None:
    old, young = sequence(1, 10, max_tokens=60), sequence(2, 10, max_tokens=20)
    scheduler = scheduler_of(old, young, free=30)
    decode(young, 2)
    decode(old, 10)
    assert preempted(scheduler, 7) == 2
    assert preempted(scheduler, 8) is None
    assert list(scheduler.live) == [1]
    [waiting] = scheduler.queue
    assert (waiting.sequence_id, waiting.request_id, waiting.stats.preempted) == (7, 2, 1)
    assert (waiting.given, waiting.prefilled, waiting.stated) == (12, 0, 0)
    assert waiting.prefilling
    scheduler.admit()
    assert list(scheduler.live) == [1], "12 tokens would fit, and 30 do not"
    end(scheduler, 1)
    scheduler.admit()
    assert list(scheduler.live) == [7]
    assert slots(scheduler).owned == {7: 30}


def test_the_least_urgent_makes_room() -> None:
    scheduler = scheduler_of(
        sequence(1, 10, max_tokens=60, priority=5), sequence(2, 10, max_tokens=60), sequence(3, 10), free=37
    )
    decode(scheduler.live[2], 5)
    assert preempted(scheduler, 7) == 1


def test_nobody_is_preempted_twice() -> None:
    """If an older request needs the room of a request that came back, the older one is preempted itself."""
    scheduler = scheduler_of(sequence(1, 10, max_tokens=60), sequence(2, 10, max_tokens=10), free=80)
    decode(scheduler.live[2], 1)
    victim = scheduler.live[2]
    end(scheduler, 2)
    scheduler.add(victim.again(7))
    scheduler.admit()
    assert slots(scheduler).owned == {1: 12, 7: 20}
    slots(scheduler).free = 0
    decode(scheduler.live[1], 30)
    assert preempted(scheduler, 8) == 1


def test_the_most_urgent_gets_what_is_left() -> None:
    """There is room for one more round. The request that arrived first gets it, although the other went live first."""
    scheduler = scheduler_of(sequence(2, 10, max_tokens=60), free=24)
    scheduler.add(sequence(1, 10, max_tokens=60, priority=-1))
    slots(scheduler).free = 12
    scheduler.admit()
    assert list(scheduler.live) == [2, 1]
    slots(scheduler).free = 8
    for each in (1, 2):
        decode(scheduler.live[each], 1)
    assert preempted(scheduler, 7) == 2
    assert slots(scheduler).owned[1] == 18


def test_a_request_that_slots_of_others_would_not_help_makes_room_itself() -> None:
    scheduler = scheduler_of(sequence(1, 10, max_tokens=60), sequence(2, 10, max_tokens=60), free=24)
    slots(scheduler).hemmed.add(1)
    for each in (1, 2):
        decode(scheduler.live[each], 1)
    assert preempted(scheduler, 7) == 1


def test_a_preempted_request_keeps_its_deadline_and_its_figures() -> None:
    first = sequence(1, 10)
    first.deadline, first.stats.decode_s = 123.0, 4.0
    again = first.again(7)
    assert (again.deadline, again.stats.decode_s, again.stats.preempted) == (123.0, 4.0, 1)
    assert (again.clock, again.tokens) == (first.clock, first.tokens)


def test_prompt_logprobs_reach_the_caller_once() -> None:
    """If a prompt is read again after a preemption, its logprobs are left out."""
    from triforce_core.messages import TokenLogprobs

    scores = tuple(TokenLogprobs(float(-i)) for i in range(10))
    first = sequence(1, 10)
    assert first.unreported(scores[:4]) == scores[:4]
    again = first.again(2)
    assert again.unreported(scores[:3]) == ()
    assert again.unreported(scores[3:7]) == scores[4:7]
    third = again.again(3)
    assert third.unreported(scores) == scores[7:]
