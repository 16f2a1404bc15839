"""Who goes live, and how a pass is shared: the scheduler by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.by_hand import Slots
from triforce_core.engine.scheduler import Scheduler
from triforce_core.engine.sequence import Request, Sequence
from triforce_core.messages import GREEDY, SequenceSpec, Work

CHUNK = 8


def sequence(sequence_id: int, prompt: int, *, max_tokens: int = 4, resume: int = 0) -> Sequence:
    tokens = list(range(prompt + resume))
    request = Request(
        tuple(tokens[:prompt]), max_tokens, GREEDY, seed=0, lookaheads=(4, 2), resume=tuple(tokens[prompt:])
    )
    return Sequence(sequence_id, request, SequenceSpec(GREEDY, 0, prompt, prompt + max_tokens), tokens)


def scheduler_of(*sequences: Sequence, free: int = 10_000, max_sequences: int = 8) -> Scheduler:
    scheduler = Scheduler(Slots(free), max_sequences=max_sequences, prefill_chunk=CHUNK)
    scheduler.queue.extend(sequences)
    scheduler.admit()
    return scheduler


def answered(scheduler: Scheduler, work: list[Work]) -> None:
    """As by the engine, for prompt chunks: the target holds what it was told."""
    for w in work:
        live = scheduler.live[w.span.sequence_id]
        live.work, live.prefilled = None, w.span.end


def chunks_of(work: list[Work]) -> list[Work]:
    """Of prompts: no tier below the target is asked anything."""
    return [w for w in work if not any(w.lookaheads[1:])]


def spans(work: list[Work]) -> list[tuple[int, int, int]]:
    return [(w.span.sequence_id, w.span.start, w.span.end) for w in work]


def test_the_prompt_chunks_of_a_pass_share_one_budget() -> None:
    """First come, first served: a budget for each request would make a pass as long as there are requests."""
    scheduler = scheduler_of(sequence(1, 12), sequence(2, 3), sequence(3, 9))
    expected = [
        [(1, 0, 8)],
        [(1, 8, 12), (2, 0, 3), (3, 0, 1)],
        [(3, 1, 9)],
        [],
    ]
    for passed, wanted in enumerate(expected):
        chunks = chunks_of(scheduler.next_work())
        assert spans(chunks) == wanted, f"pass {passed}"
        answered(scheduler, chunks)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=8))
def test_every_prompt_is_told_once_and_in_order(lengths: list[tuple[int, int]]) -> None:
    """Resumed output is told with the prompt. Passes take all of the budget while there is a prompt left."""
    scheduler = scheduler_of(*(sequence(i, n, resume=r) for i, (n, r) in enumerate(lengths)))
    told = [0] * len(lengths)
    whole = [n + r for n, r in lengths]
    while told != whole:
        chunks = chunks_of(scheduler.next_work())
        sizes = [len(w.span.tokens) for w in chunks]
        assert sum(sizes) == min(CHUNK, sum(whole) - sum(told))
        assert 0 not in sizes
        for w in chunks:
            assert w.span.start == told[w.span.sequence_id]
            assert (w.span.spec is not None) == (w.span.start == 0)
            told[w.span.sequence_id] = w.span.end
            last = w.span.end == whole[w.span.sequence_id]
            assert (w.sample, w.lookaheads) == ((True, (1, 0, 0)) if last else (False, (1,)))
        answered(scheduler, chunks)


def test_decoding_waits_for_no_prompt() -> None:
    """Rounds take nothing of the budget, and go out beside any number of prompt chunks."""
    scheduler = scheduler_of(sequence(1, 20), sequence(2, 2), sequence(3, 2))
    decoding = scheduler.live[2]
    decoding.tokens.append(7)
    decoding.prefilled = 2
    work = scheduler.next_work()
    assert spans(work) == [(1, 0, 8), (2, 0, 3)], "of the third's prompt there is no room"
    assert work[1].lookaheads == (1, 4, 2)
    assert work[1].sample


def test_a_request_that_waits_for_an_answer_is_asked_nothing() -> None:
    scheduler = scheduler_of(sequence(1, 20), sequence(2, 2))
    first = scheduler.next_work()
    assert spans(first) == [(1, 0, 8)]
    assert spans(scheduler.next_work()) == [(2, 0, 2)], "the budget goes to who can use it"
    assert scheduler.next_work() == []
    answered(scheduler, first)
    assert spans(scheduler.next_work()) == [(1, 8, 16)]


def test_requests_go_live_in_turn_and_only_with_room_for_their_whole_length() -> None:
    """A short one does not pass a long one by, or the long one might wait for ever."""
    scheduler = scheduler_of(sequence(1, 50), sequence(2, 60), sequence(3, 5), free=100)
    assert list(scheduler.live) == [1]
    assert isinstance(scheduler.kv, Slots)
    assert scheduler.kv.free == 100 - 54, "prompt and output"
    scheduler.remove(1)
    scheduler.kv.free += 54
    scheduler.admit()
    assert list(scheduler.live) == [2, 3]
    assert not scheduler.queue


def test_no_more_than_so_many_are_live() -> None:
    scheduler = scheduler_of(*(sequence(i, 5) for i in range(5)), max_sequences=2)
    assert list(scheduler.live) == [0, 1]
    scheduler.remove(0)
    scheduler.admit()
    assert list(scheduler.live) == [1, 2]


def test_a_request_can_be_taken_out_wherever_it_is() -> None:
    """Once: what is gone, or was never there, is nobody's."""
    live, queued, other = sequence(1, 5), sequence(2, 5), sequence(3, 5)
    scheduler = scheduler_of(live, queued, other, max_sequences=1)
    assert scheduler.remove(2) is queued
    assert scheduler.remove(1) is live
    assert [scheduler.remove(i) for i in (1, 2, 9)] == [None] * 3
    scheduler.admit()
    assert list(scheduler.live) == [3]
    assert isinstance(scheduler.kv, Slots)
    assert scheduler.kv.opened == [1, 3], "what never went live took no room"
