"""The retrieval tier's cache: a snapshot of the target's KV below some position, and its own KV after it.

Forwarding tokens cannot restore KV below the snapshot's position; that takes another snapshot.
"""

import threading
from dataclasses import dataclass

import torch

from triforce_core.attention import Kernel
from triforce_core.kv.base import Held, KVGeometry, Lack, Placement
from triforce_core.kv.fixed import FixedKV
from triforce_core.kv.ranges import Range, sliced
from triforce_core.kv.snapshot import Changes, ChunkSettings, Snapshot
from triforce_core.messages import SequenceSpec

MAX_WAITING = 8  # snapshots of one sequence that arrived and are not installed yet
MAX_RELEASED = 4096  # released sequences that are remembered


@dataclass(slots=True)
class RetrievalHeld(Held):
    """The first `snapshot_tokens` slots hold the snapshot, the next ones the tail from `position` to `cached`."""

    version: int = 0
    position: int = 0
    snapshot_tokens: int = 0


class RetrievalKV(FixedKV):
    """`take` may be called from any thread. The next pass of the sequence installs what has arrived."""

    def __init__(
        self,
        geometry: KVGeometry,
        max_sequences: int,
        chunks: ChunkSettings,
        tail_tokens: int,
        kernel: Kernel,
    ) -> None:
        """`chunks`: how the target cuts snapshots."""
        super().__init__(geometry, max_sequences, chunks.budget + tail_tokens, kernel)
        self.chunks, self.tail_tokens = chunks, tail_tokens
        self.arrived: dict[int, list[Snapshot]] = {}  # not installed yet, oldest first; each is the base of the next
        self.released: dict[int, None] = {}  # sequence ids, the latest last
        self.max_sequences = max_sequences
        self.lock = threading.Lock()

    @property
    def most_nodes(self) -> int:
        return self.tail_tokens

    def take(self, snapshot: Snapshot) -> bool:
        """Accept a snapshot; False if it is refused: older than the latest here; changes to another version than the
        latest, or beyond `MAX_WAITING`; larger than the budget; of a released sequence. It may arrive before its
        sequence is stated. Of more than `max_sequences` sequences that wait, the oldest are dropped, so that none pile
        up.
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
            if snapshot.num_tokens > self.chunks.budget:
                return False
            self.arrived.pop(snapshot.sequence_id, None)  # so that it moves to the end
            self.arrived[snapshot.sequence_id] = [*waiting, snapshot]
            while len(self.arrived) > self.max_sequences:
                del self.arrived[next(iter(self.arrived))]
        return True

    def _latest(self, sequence_id: int) -> int:
        """The latest version of this sequence, installed or not; 0: none."""
        if waiting := self.arrived.get(sequence_id):
            return waiting[-1].version
        held = self.held.get(sequence_id)
        return held.version if isinstance(held, RetrievalHeld) else 0

    # If target and retrieval tier share a process, this cache is the `SnapshotSink`: delivery is immediate.

    def deliver(self, snapshot: Snapshot) -> None:
        self.take(snapshot)

    def busy(self, sequence_id: int) -> bool:
        return False

    def confirmed(self, sequence_id: int) -> int:
        with self.lock:
            return self._latest(sequence_id)

    def is_live(self, sequence_id: int) -> bool:
        """False if the sequence was released: snapshots that still arrive for it are useless."""
        with self.lock:
            return sequence_id not in self.released

    def drop_unstated(self) -> None:
        """Drop what has arrived for sequences that are not stated here. Called by the thread that runs passes."""
        with self.lock:
            self.arrived = {i: waiting for i, waiting in self.arrived.items() if i in self.held}

    def open(self, sequence_id: int, spec: SequenceSpec) -> Held | None:
        with self.lock:  # a lost link also releases sequences; the level above then states them again
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
        behind = end + len(held.tree.tokens)
        if not held.version or behind - held.position > self.tail_tokens:
            return Lack(snapshot_wanted=True)
        if end - num_sampled < held.position:  # an outdated statement: the snapshot already covers these positions
            return Lack()
        keep = max(keep, held.position)  # earlier tokens are settled, and the snapshot replaces their KV
        held.cached = end
        before = held.snapshot_tokens - held.position  # position + before: the slot of a tail token
        return Placement(
            tokens=held.tokens[keep:end],
            positions=range(keep, end),
            writes=sliced(held.ranges, before + keep, before + behind),
            visible=sliced(held.ranges, 0, before + keep),
            near=self._near(held, keep),
        )

    def _near(self, held: RetrievalHeld, first: int) -> list[Range] | None:
        """What layers with a window see when the tokens from position `first` on are forwarded: whole chunks of the
        snapshot, and each token after them.
        """
        window, chunk = self.geometry.windows.size, self.chunks.chunk
        if not window:
            return None
        oldest, complete, near = max(0, first - window + 1), held.position // chunk, self.chunks.near(window)
        begin = max(oldest // chunk, complete - near)  # the first chunk; they lie in a circle of `near` places
        place, count = begin % near, max(0, complete - begin)
        before = held.snapshot_tokens - held.position
        return [
            *sliced(held.ranges, place * chunk, min(place + count, near) * chunk),
            *sliced(held.ranges, 0, max(0, place + count - near) * chunk),
            *sliced(held.ranges, before + max(complete * chunk, oldest), before + first),
        ]

    def _install(self, sequence_id: int, held: RetrievalHeld) -> bool:
        """Copy newer snapshots into the pool, its only tensor work but `attend`; returns whether any had arrived."""
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
        keys, values = self.pools[0].unbind(1)
        for start, stop in sliced(held.ranges, kept, snapshot.num_tokens):
            piece = slice(first, first + stop - start)
            keys[:, :, start:stop] = snapshot.keys[:, :, piece]
            values[:, :, start:stop] = snapshot.values[:, :, piece]
            first = piece.stop

    def _replace(self, changes: Changes, held: RetrievalHeld) -> None:
        """Overwrite the replaced chunks."""
        replaced, chunk = changes.keys.shape[:2]
        if not replaced:
            return
        device = self.geometry.device
        slots = torch.cat([torch.arange(a, b, device=device) for a, b in sliced(held.ranges, 0, changes.kept)])
        layers, kv_heads, places = changes.places.long().unsqueeze(-1).unbind(1)
        into = slots[places * chunk + torch.arange(chunk, device=device)]  # [replaced, chunk]
        pool = self.pools[0].flatten(0, 3)
        rows, behind = self.rows(layers, kv_heads, into)
        pool[rows] = changes.keys
        pool[rows + behind] = changes.values
