"""The engine's messages: what was submitted and what was cancelled, in whatever order the loop finds them."""

from __future__ import annotations

import pytest

from tests.by_hand import Below, Slots
from triforce_core.engine.engine import Engine
from triforce_core.engine.limits import Limits
from triforce_core.engine.scheduler import Scheduler
from triforce_core.engine.sequence import FinishReason, Request
from triforce_core.messages import GREEDY, Proposal


class NoSnapshots:
    def update(self, sequence: object, *, wanted: bool) -> None:
        """None is ever due."""


@pytest.fixture
def engine(below: Below) -> Engine:
    scheduler = Scheduler(Slots(1000), max_sequences=2, prefill_chunk=64)
    return Engine(below, scheduler, NoSnapshots(), Limits(100, 1000, 100))  # type: ignore[arg-type]


def request(max_tokens: int = 4) -> Request:
    return Request((10, 11), max_tokens, GREEDY, 0, (0, 0))


def test_a_request_cancelled_before_the_loop_has_seen_it_ends_cancelled(engine: Engine, below: Below) -> None:
    """Were cancellations looked at first, it would be unknown then, and run to its end for nobody."""
    gone, stays = engine.submit(request()), engine.submit(request())
    engine.cancel(gone)
    below.answers = [[]]
    [output] = engine.run_once()
    assert (output.sequence_id, output.finish_reason, output.tokens) == (gone, FinishReason.CANCELLED, ())
    assert [w.span.sequence_id for w in below.asked] == [stays], "nothing was asked for it"
    assert list(engine.scheduler.live) == [stays]


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
