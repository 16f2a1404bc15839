"""The retrieval tier's cache: a snapshot of the target's KV below some position, and its own KV after it.

Below the snapshot's position nothing can be mended by forwarding tokens: what is wanted then is another snapshot.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from triforce_core.attention import Kernel
from triforce_core.kv.base import Held, KVGeometry, Lack, Placement
from triforce_core.kv.fixed import FixedKV
from triforce_core.kv.ranges import Range, sliced
from triforce_core.kv.snapshot import Changes, Snapshot
from triforce_core.messages import SequenceSpec

MAX_WAITING = 8  # snapshots of one sequence that change one another and are not installed yet
MAX_RELEASED = 4096  # sequences that are remembered to be over


@dataclass(slots=True)
class RetrievalHeld(Held):
    """`snapshot_tokens` slots hold the snapshot, the following ones the tail from `position` to `cached`."""

    version: int = 0
    position: int = 0
    snapshot_tokens: int = 0


class RetrievalKV(FixedKV):
    """`take` may be called from any thread; a new version takes effect at the next pass, whole."""

    def __init__(self, geometry: KVGeometry, max_sequences: int, budget: int, tail_tokens: int, kernel: Kernel) -> None:
        super().__init__(geometry, max_sequences, budget + tail_tokens, kernel)
        self.budget, self.tail_tokens = budget, tail_tokens
        self.arrived: dict[int, list[Snapshot]] = {}  # not installed yet, oldest first; each the base of the next
        self.released: dict[int, None] = {}  # sequence ids, the latest last
        self.max_sequences = max_sequences
        self.lock = threading.Lock()

    def take(self, snapshot: Snapshot) -> bool:
        """Take a snapshot in; False where it is refused: an older version than one already here, changes to one that is
        not the latest here, or one of a sequence that was released.

        One may come before its sequence is stated here: what nobody installs is pushed out.
        """
        with self.lock:
            if snapshot.sequence_id in self.released:
                return False
            latest, waiting = self._latest(snapshot.sequence_id), self.arrived.get(snapshot.sequence_id, [])
            if snapshot.version <= latest:
                return snapshot.version == latest
            if snapshot.changes is None:
                waiting = []
            elif snapshot.changes.base != latest or len(waiting) == MAX_WAITING:
                return False
            if snapshot.num_tokens > self.budget:
                return False
            self.arrived.pop(snapshot.sequence_id, None)  # to stand last
            self.arrived[snapshot.sequence_id] = [*waiting, snapshot]
            while len(self.arrived) > self.max_sequences:
                del self.arrived[next(iter(self.arrived))]
        return True

    def _latest(self, sequence_id: int) -> int:
        """The latest version here, installed or not; 0: none."""
        if waiting := self.arrived.get(sequence_id):
            return waiting[-1].version
        held = self.held.get(sequence_id)
        return held.version if isinstance(held, RetrievalHeld) else 0

    # In one process this cache is itself the sink: a delivered snapshot is there.

    def deliver(self, snapshot: Snapshot) -> None:
        self.take(snapshot)

    def busy(self, sequence_id: int) -> bool:
        return False

    def confirmed(self, sequence_id: int) -> int:
        with self.lock:
            return self._latest(sequence_id)

    def is_live(self, sequence_id: int) -> bool:
        """False: it is over, and whatever is still on its way would lie here for nobody."""
        with self.lock:
            return sequence_id not in self.released

    def open(self, sequence_id: int, spec: SequenceSpec) -> Held | None:
        with self.lock:  # also where only a link had ended: then the level above states it again
            self.released.pop(sequence_id, None)
        return super().open(sequence_id, spec)

    def release(self, sequence_id: int) -> None:
        super().release(sequence_id)
        with self.lock:
            self.arrived.pop(sequence_id, None)
            self.released[sequence_id] = None
            while len(self.released) > MAX_RELEASED:
                del self.released[next(iter(self.released))]

    def new_held(self, spec: SequenceSpec, ranges: list[Range]) -> RetrievalHeld:
        return RetrievalHeld(spec, ranges=ranges)

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
        """Copy newer snapshots into the pool, if some arrived: the only tensor work outside `attend`."""
        with self.lock:
            waiting, before = self.arrived.pop(sequence_id, []), held.version
            for snapshot in waiting:
                if snapshot.version > held.version:
                    self._write(snapshot, held)
                    held.version, held.position = snapshot.version, snapshot.position
                    held.snapshot_tokens = snapshot.num_tokens
            return held.version > before

    def _write(self, snapshot: Snapshot, held: RetrievalHeld) -> None:
        kept = first = 0
        if snapshot.changes:
            self._replace(snapshot.changes, held)
            kept = snapshot.changes.kept
        for start, stop in sliced(held.ranges, kept, snapshot.num_tokens):
            piece = slice(first, first + stop - start)
            for layer in range(self.geometry.num_layers):
                self.keys[layer][:, start:stop] = snapshot.keys[layer, :, piece]
                self.values[layer][:, start:stop] = snapshot.values[layer, :, piece]
            first = piece.stop

    def _replace(self, changes: Changes, held: RetrievalHeld) -> None:
        """Put chunks in the places of others."""
        replaced, chunk = changes.keys.shape[:2]
        if not replaced:
            return
        device = self.geometry.device
        slots = torch.cat([torch.arange(a, b, device=device) for a, b in sliced(held.ranges, 0, changes.kept)])
        layers, kv_heads, places = changes.places.long().unbind(1)
        into = slots[places[:, None] * chunk + torch.arange(chunk, device=device)]  # [replaced, chunk]
        first = 0
        for layer, count in enumerate(torch.bincount(layers, minlength=self.geometry.num_layers).tolist()):
            rows = slice(first, first + count)
            self.keys[layer][kv_heads[rows, None], into[rows]] = changes.keys[rows]
            self.values[layer][kv_heads[rows, None], into[rows]] = changes.values[rows]
            first = rows.stop
