"""The retrieval tier's cache: a snapshot of the target's KV below some position, and its own KV after it.

Below the snapshot's position nothing can be mended by forwarding tokens: what is wanted then is another snapshot.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from triforce_core.attention import Kernel
from triforce_core.kv.base import Held, KVCache, KVGeometry, Lack, Placement
from triforce_core.kv.ranges import Range, sliced
from triforce_core.kv.snapshot import Snapshot
from triforce_core.messages import SequenceSpec


@dataclass(slots=True)
class RetrievalHeld(Held):
    """`snapshot_tokens` slots hold the snapshot, the following ones the tail from `position` to `cached`."""

    version: int = 0
    position: int = 0
    snapshot_tokens: int = 0


class RetrievalKV(KVCache):
    """`deliver` may be called from any thread; a new version takes effect at the next pass, whole."""

    def __init__(self, geometry: KVGeometry, max_sequences: int, budget: int, tail_tokens: int, kernel: Kernel) -> None:
        super().__init__(geometry, max_sequences * (budget + tail_tokens), kernel)
        self.budget, self.tail_tokens = budget, tail_tokens
        self.arrived: dict[int, Snapshot] = {}  # not installed yet, oldest first
        self.max_sequences = max_sequences
        self.lock = threading.Lock()

    def deliver(self, snapshot: Snapshot) -> None:
        """Take a snapshot; an older version than one already here is dropped.

        One may come before its sequence is stated here, or after it was released: what nobody installs is pushed out.
        """
        with self.lock:
            waiting = self.arrived.get(snapshot.sequence_id)
            if waiting is None or waiting.version < snapshot.version:
                self.arrived.pop(snapshot.sequence_id, None)  # to stand last
                self.arrived[snapshot.sequence_id] = snapshot
            while len(self.arrived) > self.max_sequences:
                del self.arrived[next(iter(self.arrived))]

    def in_flight(self, sequence_id: int) -> bool:
        """Never: in one process a delivered snapshot is there."""
        return False

    def release(self, sequence_id: int) -> None:
        super().release(sequence_id)
        with self.lock:
            self.arrived.pop(sequence_id, None)

    def new_held(self, spec: SequenceSpec, ranges: list[Range]) -> RetrievalHeld:
        return RetrievalHeld(spec, ranges=ranges)

    def slots_for(self, spec: SequenceSpec) -> int:
        return self.budget + self.tail_tokens

    def place(self, sequence_id: int, held: Held, keep: int, end: int, num_sampled: int) -> Placement | Lack:
        assert isinstance(held, RetrievalHeld)
        if self._install(sequence_id, held):
            keep = held.position  # the tail is forwarded again, now seeing the new snapshot
        held.cached = keep
        if not held.version or end - held.position > self.tail_tokens:
            return Lack(snapshot_wanted=True)
        if end - num_sampled < held.position:  # a late statement: the snapshot is already ahead of it
            return Lack()
        keep = max(keep, held.position)  # tokens below are settled, and the snapshot stands for them
        held.cached = end
        before = held.snapshot_tokens - held.position  # slot of a tail token, less its position
        return Placement(
            tokens=held.tokens[keep:end],
            positions=range(keep, end),
            writes=sliced(held.ranges, before + keep, before + end),
            visible=sliced(held.ranges, 0, before + keep),
        )

    def _install(self, sequence_id: int, held: RetrievalHeld) -> bool:
        """Copy a newer snapshot into the pool, if one arrived: the only tensor work outside `attend`."""
        with self.lock:
            snapshot = self.arrived.pop(sequence_id, None)
        if snapshot is None or snapshot.version <= held.version:
            return False
        first = 0
        for start, stop in sliced(held.ranges, 0, snapshot.keys.shape[2]):
            piece = slice(first, first + stop - start)
            for layer in range(self.geometry.num_layers):
                self.keys[layer][:, start:stop] = snapshot.keys[layer, :, piece]
                self.values[layer][:, start:stop] = snapshot.values[layer, :, piece]
            first = piece.stop
        held.version, held.position, held.snapshot_tokens = snapshot.version, snapshot.position, first
        return True
