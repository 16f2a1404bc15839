"""When snapshots are cut, and against what: the policy between an engine's sequence and a sink of any reliability."""

from __future__ import annotations

import torch

from triforce_core.engine.engine import SnapshotSchedule
from triforce_core.engine.sequence import Request, Sequence
from triforce_core.kv.selectors import MeanKey
from triforce_core.kv.snapshot import Changes, ChunkSettings, Snapshot
from triforce_core.messages import GREEDY, SequenceSpec
from triforce_core.plans import Plan

Sent = tuple[int, int]  # position, base


class Recorder:
    """A cache that knows every layout, and a sink that does as told."""

    def __init__(self, refresh_every: int) -> None:
        self.sent: list[Sent] = []
        self.version, self.known, self.occupied, self.loses = 0, 0, False, False
        self.policy = SnapshotSchedule(self, self, ChunkSettings(), "mean_key", refresh_every)  # type: ignore[arg-type]
        request = Request((1,) * 100, 1000, GREEDY, 0, (4, 2))
        self.sequence = Sequence(7, request, SequenceSpec(GREEDY, 0, 100, 1100), [1] * 100)

    def grow(self, count: int, *, wanted: bool = False) -> list[Sent]:
        """Commit tokens; what was sent then."""
        self.sequence.tokens += [1] * count
        self.sent = []
        self.policy.update(self.sequence, wanted=wanted)
        return self.sent

    def snapshot(self, position: int, base: int) -> Snapshot:
        self.version += 1
        none = torch.empty(0)
        changes = Changes(base, 8, none, none, none) if base else None
        return Snapshot(7, self.version, position, none, none, changes)

    def cut(self, sequence_id: int, position: int, chunks: ChunkSettings, selector: MeanKey, base: int) -> Snapshot:
        self.sent.append((position, base))
        return self.snapshot(position, base)

    def deliver(self, snapshot: Snapshot) -> None:
        self.known = self.known if self.loses else snapshot.version

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
