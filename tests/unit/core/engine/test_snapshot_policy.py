"""When snapshots are cut, and against what: the policy between an engine's sequence and a sink of any reliability."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.by_hand import Below, Slots
from triforce_core.engine.controller import Controller
from triforce_core.engine.engine import Engine, SnapshotSchedule
from triforce_core.engine.freshness import has_sagged
from triforce_core.engine.limits import Limits
from triforce_core.engine.scheduler import Scheduler
from triforce_core.engine.sequence import Request, Sequence
from triforce_core.kv.selectors import MeanKey, Selector
from triforce_core.kv.snapshot import Changes, ChunkSettings, Snapshot
from triforce_core.messages import GREEDY, Drafting, SequenceSpec, Tally
from triforce_core.plans import Plan

Sent = tuple[int, int]  # position, base


class Recorder:
    """A cache that knows every layout, and a sink that does as told."""

    def __init__(self, refresh_every: int) -> None:
        self.sent: list[Sent] = []
        self.selectors: list[Selector] = []
        self.version, self.known, self.occupied, self.loses = 0, 0, False, False
        self.sent_off = False  # what is delivered keeps the sink busy
        self.policy = SnapshotSchedule(self, self, ChunkSettings(), "mean_key", refresh_every)  # type: ignore[arg-type]
        request = Request((1,) * 100, 1000, GREEDY, 0, (4, 2))
        self.sequence = Sequence(7, request, SequenceSpec(GREEDY, 0, 100, 1100, selector="mean_key"), [1] * 100)

    def grow(self, count: int, *, wanted: bool = False) -> list[Sent]:
        """Commit tokens, and return what was sent then."""
        self.sequence.tokens += [1] * count
        self.sent = []
        self.policy.update(self.sequence, wanted=wanted)
        return self.sent

    def snapshot(self, position: int, base: int) -> Snapshot:
        self.version += 1
        none = torch.empty(0)
        changes = Changes(base, 8, none, none, none) if base else None
        return Snapshot(7, self.version, position, none, none, changes)

    def round(self, accepted: int, rejected: int) -> list[Sent]:
        """Run a round of the target, which commits the accepted tokens and one of its own. Return what was sent
        then.
        """
        self.policy.saw(self.sequence, Tally(1, accepted + rejected, accepted, rejected))
        return self.grow(accepted + 1)

    def cut(self, sequence_id: int, position: int, chunks: ChunkSettings, selector: Selector, base: int) -> Snapshot:
        self.selectors.append(selector)
        self.sent.append((position, base))
        return self.snapshot(position, base)

    def deliver(self, snapshot: Snapshot) -> None:
        self.known = self.known if self.loses else snapshot.version
        self.occupied |= self.sent_off

    def busy(self, sequence_id: int) -> bool:
        return self.occupied

    def confirmed(self, sequence_id: int) -> int:
        return self.known


def test_refreshes_are_changes_to_what_was_confirmed() -> None:
    it = Recorder(refresh_every=10)
    assert it.grow(0) == [(99, 0)], "the first, whole"
    assert it.grow(9) == []
    assert it.grow(1) == [(109, 1)]
    it.occupied = True
    assert it.grow(20, wanted=True) == [], "one at a time"
    it.occupied = False
    assert it.grow(0) == [(129, 2)]
    assert it.grow(1, wanted=True) == [(130, 0)], "who asks may hold nothing"
    assert it.grow(10) == [(140, 4)]
    assert it.sequence.stats.snapshots == 5


def test_lost_changes_are_followed_by_a_whole_snapshot_once() -> None:
    it = Recorder(refresh_every=10)
    it.grow(0)
    it.loses = True
    assert it.grow(10) == [(109, 1)]
    assert it.grow(1) == [(110, 0)]
    assert it.grow(1) == [], "a tier that takes nothing is not flooded"
    assert it.grow(8) == []
    it.loses = False
    assert it.grow(1) == [(120, 1)], "the cache, not the policy, knows whether that base will do"
    assert it.grow(10) == [(130, 4)]


def test_whoever_does_not_draft_gets_none() -> None:
    it = Recorder(refresh_every=1)
    it.sequence.plan = Plan(0, 3)
    assert it.grow(5, wanted=True) == []


def test_a_snapshot_is_cut_by_the_selector_of_its_request() -> None:
    it = Recorder(refresh_every=10)
    it.grow(0)
    assert it.selectors == [MeanKey()]


def tally(accepted: int, rejected: int) -> Tally:
    return Tally(1, accepted + rejected, accepted, rejected)


def test_acceptance_has_sagged_only_where_chance_is_an_unlikely_reason() -> None:
    assert not has_sagged(tally(16, 0), tally(0, 0)), "nothing to compare"
    assert not has_sagged(tally(0, 0), tally(0, 9))
    assert not has_sagged(tally(0, 16), tally(0, 40)), "it was never good"
    assert not has_sagged(tally(8, 8), tally(16, 0)), "it has risen"
    assert not has_sagged(tally(16, 0), tally(14, 2)), "a rejection or two mean little"
    assert not has_sagged(tally(16, 0), tally(0, 15)), "nor do a few tokens"
    assert not has_sagged(tally(15, 0), tally(0, 16))
    assert has_sagged(tally(16, 0), tally(10, 6))
    assert has_sagged(tally(14, 2), tally(6, 10))
    assert not has_sagged(tally(14, 2), tally(8, 8))
    assert has_sagged(tally(140, 20), tally(120, 40)), "a smaller fall, of ten times as many tokens"


def test_a_snapshot_that_no_longer_serves_is_renewed_early() -> None:
    it = Recorder(refresh_every=64)
    assert it.grow(0) == [(99, 0)]
    for _ in range(2):
        assert it.round(8, 0) == []
    for _ in range(7):
        assert it.round(2, 1) == [], "as chance has it"
    assert it.round(2, 1) == [(141, 1)], "changes to the one that is there"
    for _ in range(20):
        assert it.round(0, 1) == [], "what a fresh one does not help is not renewed again"
    assert it.sequence.stats.snapshots == 2


def test_steady_acceptance_leaves_nearly_every_interval_as_it_is() -> None:
    chance, it, positions = random.Random(0), Recorder(refresh_every=64), []
    for _ in range(4000):
        accepted = next((n for n in range(8) if chance.random() > 0.8), 8)
        positions += [position for position, _ in it.round(accepted, int(accepted < 8))]
    intervals = [after - before for before, after in pairwise(positions)]
    assert len(intervals) > 200
    assert sum(interval < 64 for interval in intervals) <= 0.04 * len(intervals)


def test_rounds_before_the_snapshot_has_arrived_are_not_its_own() -> None:
    it = Recorder(refresh_every=64)
    it.loses = True
    assert it.grow(0) == [(99, 0)]
    it.round(0, 1)
    assert it.sequence.since_cut.first == Tally()
    it.known = it.version
    it.round(8, 0)
    assert it.sequence.since_cut.first.accepted == 8


def test_a_snapshot_that_was_lost_or_refused_is_not_waited_for() -> None:
    """A plan that waited for it would give the retrieval tier no work, and so no reason to ask for another."""
    it = Recorder(refresh_every=64)
    it.loses = True
    assert it.grow(0) == [(99, 0)]
    it.occupied = True
    assert it.policy.comes(it.sequence)
    it.occupied = False
    assert not it.policy.comes(it.sequence)
    it.known, it.occupied = it.version, True
    assert not it.policy.comes(it.sequence), "it is there, while others are on their way"


@pytest.mark.parametrize("on_its_way", [True, False])
def test_a_plan_waits_for_its_first_snapshot_while_that_is_on_its_way(below: Below, on_its_way: bool) -> None:
    it = Recorder(refresh_every=64)
    it.loses = True
    it.sequence.request = replace(it.sequence.request, lookaheads=None)
    it.sequence.plan = Plan(4, 2)
    scheduler = Scheduler(Slots(1000), max_sequences=2, prefill_chunk=64)
    engine = Engine(below, scheduler, it.policy, Limits(100, 1000, 100), controller=Controller((4, 2), tuple(Drafting)))
    it.sent_off = on_its_way
    engine._update_snapshot(it.sequence, wanted=False)
    assert it.sent == [(99, 0)]
    assert it.sequence.plan_waits is on_its_way
