"""The engine's messages: what was submitted and what was cancelled, in whatever order the loop finds them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest

from tests.by_hand import Below, Slots
from triforce_core.costs import Part
from triforce_core.engine.engine import MOST_FAILURES, Engine
from triforce_core.engine.limits import Limits
from triforce_core.engine.scheduler import Scheduler
from triforce_core.engine.sequence import FinishReason, Request, Sequence
from triforce_core.messages import GREEDY, Proposal, Tally


class NoSnapshots:
    selector = "streaming"

    def update(self, sequence: object, *, wanted: bool) -> None:
        """No snapshot is ever due."""

    def saw(self, sequence: object, tally: Tally) -> None:
        """Nothing depends on the tally."""


@pytest.fixture
def engine(below: Below) -> Engine:
    scheduler = Scheduler(Slots(1000), max_sequences=2, prefill_chunk=64)
    return Engine(below, scheduler, NoSnapshots(), Limits(100, 1000, 100))  # type: ignore[arg-type]


def request(max_tokens: int = 4) -> Request:
    return Request((10, 11), max_tokens, GREEDY, 0, (0, 0))


def test_a_request_cancelled_before_the_loop_has_seen_it_ends_cancelled(engine: Engine, below: Below) -> None:
    """If the loop looked at cancellations first, it would not know the request yet, and would run it to its end for
    nobody.
    """
    gone, stays = engine.submit(request()), engine.submit(request())
    engine.cancel(gone)
    below.answers = [[]]
    [output] = engine.run_once()
    assert (output.sequence_id, output.finish_reason, output.tokens) == (gone, FinishReason.CANCELLED, ())
    assert [w.span.sequence_id for w in below.asked] == [stays], "nothing was asked for it"
    assert list(engine.scheduler.live) == [stays]


class Late(deque[Sequence]):
    """A queue of arrivals. A request comes, and is cancelled, just when the loop has found the queue empty."""

    def __bool__(self) -> bool:
        if len(self) or (late := self.late) is None:
            return len(self) > 0
        self.late = None
        late()
        return False

    late: Callable[[], None] | None = None


def test_a_request_that_comes_and_goes_while_the_loop_looks_ends_cancelled(engine: Engine, below: Below) -> None:
    engine.arrivals = arrivals = Late()
    arrivals.late = lambda: engine.cancel(engine.submit(request()))
    below.answers = [[], []]
    outputs = engine.run_once() + engine.run_once()
    assert [output.finish_reason for output in outputs] == [FinishReason.CANCELLED]
    assert below.asked == []


def test_one_that_lives_ends_cancelled_and_is_released(engine: Engine, below: Below) -> None:
    sequence_id = engine.submit(request())
    below.answers = [[Proposal(sequence_id, 2, (7,), b"\2")], []]
    [output] = engine.run_once()
    assert output.finish_reason is None
    engine.cancel(sequence_id)
    [output] = engine.run_once()
    assert output.finish_reason is FinishReason.CANCELLED
    assert below.released == [sequence_id]
    assert engine.idle


@pytest.mark.parametrize("where", ["arrival", "advance", "snapshot"])
def test_an_error_in_work_on_one_request_ends_that_request_alone(
    engine: Engine, below: Below, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    bad, good = (engine.submit(request(max_tokens=9)) for _ in range(2))
    engine.ends_alone = True
    owner, name = {
        "arrival": (engine.scheduler, "add"),
        "advance": (engine, "_advance"),
        "snapshot": (engine.snapshots, "update"),
    }[where]
    method, faults = getattr(owner, name), iter([RuntimeError("a fault")])

    def broken(*given: object, **named: object) -> object:
        for fault in faults:
            raise fault
        return method(*given, **named)

    monkeypatch.setattr(owner, name, broken)
    below.answers = [
        [Proposal(i, 2, (7,), b"\2") for i in (bad, good)],
        [Proposal(i, 3, (8,), b"\2", tallies=(Tally(1),)) for i in (bad, good)],
    ]
    outputs = engine.run_once() + engine.run_once()
    assert [o.sequence_id for o in outputs if o.finish_reason is FinishReason.FAILED] == [bad]
    assert [o.tokens for o in outputs if o.sequence_id == good] == [(7,), (8,)]
    assert below.released == ([] if where == "arrival" else [bad])
    assert list(engine.scheduler.live) == [good]


@pytest.mark.parametrize("ends_alone", [True, False])
def test_an_engine_that_fails_again_and_again_fails(
    engine: Engine, below: Below, monkeypatch: pytest.MonkeyPatch, ends_alone: bool
) -> None:
    """One that drives itself, as a command does, fails at once."""
    monkeypatch.setattr(engine.scheduler, "add", Mock(side_effect=RuntimeError("a fault")))
    engine.ends_alone = ends_alone
    for _ in range(MOST_FAILURES - 1 if ends_alone else 0):
        below.answers = [[]]
        engine.submit(request())
        assert [o.finish_reason for o in engine.run_once()] == [FinishReason.FAILED]
    engine.submit(request())
    with pytest.raises(RuntimeError, match="a fault"):
        engine.run_once()


def test_cancelling_what_is_unknown_or_over_is_nothing(engine: Engine, below: Below) -> None:
    sequence_id = engine.submit(request(max_tokens=1))
    below.answers = [[Proposal(sequence_id, 2, (7,), b"\2")], []]
    [output] = engine.run_once()
    assert output.finish_reason is FinishReason.LENGTH
    for other in (sequence_id, sequence_id, 99):
        engine.cancel(other)
    assert not engine.idle
    assert engine.run_once() == []
    assert engine.idle


def test_a_request_whose_time_is_over_ends_wherever_it_is(engine: Engine, below: Below) -> None:
    """Two requests are live and one is queued. The clock of each begins when it is submitted."""
    ids = [engine.submit(replace(request(), timeout_s=seconds)) for seconds in (0.01, 60.0, 0.01)]
    below.answers = [[], []]
    time.sleep(0.02)
    outputs = engine.run_once()
    assert [(o.sequence_id, o.finish_reason) for o in outputs] == [
        (ids[0], FinishReason.DEADLINE),
        (ids[2], FinishReason.DEADLINE),
    ]
    assert [w.span.sequence_id for w in below.asked] == [ids[1]]
    engine.scheduler.live[ids[1]].deadline = 0.0
    [output] = engine.run_once()
    assert (output.sequence_id, output.finish_reason) == (ids[1], FinishReason.DEADLINE)
    assert below.released == [ids[1]]
    assert engine.idle


def test_a_request_without_end_has_time_without_end(engine: Engine, below: Below) -> None:
    engine.submit(replace(request(), timeout_s=float("inf")))
    below.answers = [[]]
    assert engine.run_once() == []
    assert len(engine.scheduler.live) == 1


def test_what_is_cancelled_frees_its_slots_in_the_same_turn(engine: Engine, below: Below) -> None:
    """A request that waited for these slots goes live in that turn."""
    slots = engine.scheduler.kv
    assert isinstance(slots, Slots)
    below.release = lambda ids: [slots.release(i) for i in ids]  # type: ignore[assignment]
    first = engine.submit(request())
    below.answers = [[], []]
    engine.run_once()
    slots.free = 0
    second = engine.submit(request())
    engine.cancel(first)
    engine.run_once()
    assert list(engine.scheduler.live) == [second]


def test_a_round_begins_with_no_stall_behind_it(engine: Engine, below: Below) -> None:
    """When a round begins, it is also known what the round before took by itself."""
    sequence_id = engine.submit(request(max_tokens=9))
    below.answers = [
        [Proposal(sequence_id, 2, (7,), b"\2")],
        [],
        [Proposal(sequence_id, 3, (8,), b"\2", tallies=(Tally(1),))],
    ]
    engine.run_once()
    engine.run_once()
    live = engine.scheduler.live[sequence_id]
    live.stalled_s = 0.01
    time.sleep(0.05)
    engine.run_once()
    assert live.stalled_s == 0.0
    assert 0.03 < live.round_s < 10
    assert engine.status.kv_tokens == 2 + 9


def test_totals_add_up_over_requests_also_over_those_that_are_cut_short(engine: Engine, below: Below) -> None:
    first, second = engine.submit(request(max_tokens=9)), engine.submit(request(max_tokens=9))
    assert engine.num_waiting == 2
    below.answers = [
        [Proposal(first, 2, (7,), b"\2"), Proposal(second, 2, (7,), b"\2")],
        [Proposal(first, 3, (8, 9, 10), b"\1\1\2", tallies=(Tally(1, 4, 2, 1), Tally(2, 6, 3, 1)))],
        [Proposal(second, 3, (8,), b"\2", tallies=(Tally(1),))],
    ]
    engine.run_once()
    assert engine.num_waiting == 0
    assert engine.status.totals.rounds_by_tokens == {}, "the first token is of no round"
    engine.run_once()
    told = engine.status.totals
    assert told.rounds_by_tokens == {3: 1}
    engine.cancel(first)
    engine.run_once()
    assert told.rounds_by_tokens == {3: 1}, "what other threads read is not changed under their hands"
    totals = engine.status.totals
    assert totals.rounds_by_tokens == {3: 1, 1: 1}
    assert [tally[:4] for tally in totals.stats.tallies[:2]] == [(2, 4, 2, 1), (2, 6, 3, 1)]
    assert totals.stats.plans == {"plain": 2}
    assert (totals.prefix_hit_tokens, totals.prefix_miss_tokens) == (0, 4), "two prompts, each once"
    again = engine.submit(replace(request(max_tokens=9), resume=(7, 8)))
    below.answers = [[Proposal(again, 4, (9,), b"\2")]]
    engine.run_once()
    totals = engine.status.totals
    assert (totals.prefix_hit_tokens, totals.prefix_miss_tokens) == (0, 4), "it was counted when it first came"


def test_what_the_least_chunk_delays_is_told_once_a_prompt_shows_it(engine: Engine, below: Below) -> None:
    engine.scheduler.costs.add([Part(64, 0)], 0.01)  # the target's runner adds each of its passes
    sequence_id = engine.submit(request())
    below.answers = [[], [Proposal(sequence_id, 2, (7,), b"\2")]]
    engine.run_once()
    assert engine.status.least_stall_s == 0
    engine.run_once()
    assert engine.status.least_stall_s == engine.scheduler.least_stall_s(100) > 0
