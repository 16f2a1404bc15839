"""KV hand-over: snapshots from the target to the retrieval tier in checked pieces, off the token path.

Pieces go through Ray's object store, or directly between the two tiers' memories by Ray Direct Transport (RDT). Of
RDT's transports only NIXL is usable: it is one-sided, so a failed transfer affects no actor. When a transfer by gloo or
NCCL fails, Ray 2.60 kills both actors, and a target must not die because a drafting tier did.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.actor import ActorHandle
from torch import Tensor

from triforce_core.config import RetrievalSettings
from triforce_core.errors import require
from triforce_core.kv.pinned import PinnedStaging
from triforce_core.kv.snapshot import Changes, Snapshot

if TYPE_CHECKING:
    from triforce_core.kv.retrieval import RetrievalKV
    from triforce_core.models.replay import LeadingRetrievalKV

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0  # for all pieces of a snapshot together
PIECE_BYTES = 64 * 2**20  # size of a piece: while one piece is being sent, the next is copied off the device
ROW_BYTES = 4096  # of the table whose sums are a checksum
MAX_SENDING = 16  # snapshots being sent or queued; they occupy memory of the target's device
MAX_CONFIRMED = 4096  # sequences whose confirmed version is remembered


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a snapshot. Every piece carries it, so pieces may arrive in any order."""

    sequence_id: int
    version: int
    position: int
    base: int  # `Changes.base`; 0 if the snapshot is whole
    kept: int  # `Changes.kept`; 0 if the snapshot is whole
    dtypes: tuple[str, ...]  # of the tensors in `Snapshot.tensors`
    shapes: tuple[tuple[int, ...], ...]  # of the same tensors
    num_pieces: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of one tensor, uint8 [bytes]: a numpy array, which knows no bfloat16, for the object store."""

    manifest: Manifest
    index: int
    tensor: int  # index in `Snapshot.tensors`
    first: int  # index of the first byte in the tensor
    data: NDArray[np.uint8] | Tensor
    checksum: int

    @property
    def sound(self) -> bool:
        return self.checksum == checksum(self.data, (self.manifest, self.index, self.tensor, self.first))


def checksum(data: NDArray[np.uint8] | Tensor, about: tuple[object, ...]) -> int:
    """CRC-32 of `about` and of sums over `data`, which are several times as fast to compute as a CRC of the bytes. On
    the host, the data is arranged as a table of 64-bit words, and each row and each column has a sum. So a single word
    that has changed or moved is noticed. On a GPU, the GPU computes the sums.
    """
    crc = zlib.crc32(repr(about).encode())
    if isinstance(data, Tensor):
        if data.is_cuda:
            padded = torch.nn.functional.pad(data, (0, -len(data) % 4096)).unflatten(0, (-1, 4096))
            sums = padded.sum(1, dtype=torch.int64)
            places = torch.arange(1, len(sums) + 1, device=data.device)
            return zlib.crc32(repr((sums.sum().item(), (sums * places).sum().item())).encode(), crc)
        data = data.numpy()
    whole = len(data) // ROW_BYTES * ROW_BYTES
    table = data[:whole].view(np.uint64).reshape(-1, ROW_BYTES // 8)
    for sums in (table.sum(0), table.sum(1)):  # modulo 2**64
        crc = zlib.crc32(sums.data, crc)
    return zlib.crc32(data[whole:].data, crc)


def cut_pieces(
    snapshot: Snapshot, piece_bytes: int, staging: PinnedStaging | None = None, *, on_device: bool = False
) -> Generator[Piece]:
    """Yields the snapshot in pieces of at most `piece_bytes`, unless `on_device` on the host: from a GPU through
    `staging`, whose buffers must hold `piece_bytes` and are used again for the next piece.
    """
    tensors = [tensor.reshape(-1).view(torch.uint8) for tensor in snapshot.tensors]
    spans = [(i, first) for i, tensor in enumerate(tensors) for first in range(0, len(tensor), piece_bytes)] or [(0, 0)]
    manifest = Manifest(
        snapshot.sequence_id,
        snapshot.version,
        snapshot.position,
        snapshot.changes.base if snapshot.changes else 0,
        snapshot.changes.kept if snapshot.changes else 0,
        tuple(str(tensor.dtype).removeprefix("torch.") for tensor in snapshot.tensors),
        tuple(tuple(tensor.shape) for tensor in snapshot.tensors),
        len(spans),
    )
    parts = [tensors[i][first : first + piece_bytes] for i, first in spans]
    there: Iterable[NDArray[np.uint8] | Tensor] = parts
    if not on_device:
        staging = staging or PinnedStaging(snapshot.keys.device, piece_bytes)
        there = (part.numpy() for part in (staging.received(parts) if snapshot.keys.is_cuda else parts))
    for index, ((i, first), payload) in enumerate(zip(spans, there, strict=True)):
        yield Piece(manifest, index, i, first, payload, checksum(payload, (manifest, index, i, first)))


@dataclass(slots=True)
class Assembly:
    """The pieces of one version of a sequence's snapshot that have arrived."""

    manifest: Manifest
    buffers: list[Tensor]  # uint8 [bytes], one for each of `Snapshot.tensors`
    missing: set[int]  # indices of the pieces that have not arrived

    @classmethod
    def of(cls, piece: Piece, device: str) -> Assembly:
        """An empty assembly on this device for the snapshot to which this piece belongs."""
        manifest = piece.manifest
        sizes = [
            getattr(torch, dtype).itemsize * int(np.prod(shape))
            for dtype, shape in zip(manifest.dtypes, manifest.shapes, strict=True)
        ]
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        return cls(manifest, buffers, set(range(manifest.num_pieces)))

    def add(self, piece: Piece, staging: PinnedStaging) -> None:
        data, into = piece.data, self.buffers[piece.tensor][piece.first : piece.first + len(piece.data)]
        if isinstance(data, Tensor):
            into.copy_(data)
        elif into.is_cuda:
            staging.send(partial(copy_bytes, data), into)
        else:
            into.numpy()[:] = data
        self.missing.discard(piece.index)

    def snapshot(self) -> Snapshot:
        m = self.manifest
        keys, values, *more = (
            buffer.view(getattr(torch, dtype)).view(shape)
            for buffer, dtype, shape in zip(self.buffers, m.dtypes, m.shapes, strict=True)
        )
        changes = Changes(m.base, m.kept, *more) if more else None
        return Snapshot(m.sequence_id, m.version, m.position, keys, values, changes)


def copy_bytes(data: NDArray[np.uint8], staged: Tensor, first: int, stop: int) -> None:
    staged.numpy()[:] = data[first:stop]


class SnapshotReceiver:
    """Assembles snapshots from pieces and hands on complete ones only.

    Pieces of a finished sequence are dropped when the next piece of any sequence comes. `take_piece` may be called from
    any thread.
    """

    def __init__(
        self,
        taker: RetrievalKV | LeadingRetrievalKV,
        device: str,
        max_sequences: int,
        linked: Callable[[], bool] = lambda: True,
    ) -> None:
        """`linked`: whether a link to the tier above is open. Without a link all pieces are refused: they come from a
        target that has died, and nobody would release their snapshots.
        """
        self.taker, self.device, self.max_sequences, self.linked = taker, device, max_sequences, linked
        self.staging = PinnedStaging(torch.device(device))
        self.assemblies: dict[int, Assembly] = {}  # by sequence id, oldest first
        self.lock = threading.Lock()

    def take_piece(self, piece: Piece) -> bool | None:
        """Take a piece. Returns True if its snapshot is now complete and taken, None if other pieces are missing, and
        False if this version is refused: a piece of it is damaged, a newer version has come, it changes a snapshot that
        the taker does not hold, its sequence has finished, or no link is open.
        """
        sequence_id, version = piece.manifest.sequence_id, piece.manifest.version
        sound = piece.sound
        with self.lock:
            self.assemblies = {i: each for i, each in self.assemblies.items() if self.taker.is_live(i)}
            if not self.linked() or not self.taker.is_live(sequence_id):
                return False
            assembly = self.assemblies.get(sequence_id)
            if not sound:
                log.warning("piece %d of snapshot %d of sequence %d is damaged", piece.index, version, sequence_id)
                if assembly is not None and assembly.manifest.version == version:
                    del self.assemblies[sequence_id]
                return False
            here = self.taker.confirmed(sequence_id)
            if version <= here:
                return version == here
            if assembly is not None and assembly.manifest.version > version:
                return False
            if assembly is None or assembly.manifest.version < version:
                self.assemblies.pop(sequence_id, None)  # so that the new entry is the last
                assembly = self.assemblies[sequence_id] = Assembly.of(piece, self.device)
                while len(self.assemblies) > self.max_sequences:
                    del self.assemblies[next(iter(self.assemblies))]
            assembly.add(piece, self.staging)
            if assembly.missing:
                return None
            del self.assemblies[sequence_id]
            return self.taker.take(assembly.snapshot())

    def link_ended(self) -> None:
        """Drop the snapshots, whole or in part, of sequences that are not stated: they are a dead target's, which
        nobody would release, or a new target's, which sends them again. Called when no link is left, by the thread that
        states sequences.
        """
        with self.lock:
            self.taker.drop_unstated()
            self.assemblies = {i: each for i, each in self.assemblies.items() if i in self.taker.held}


class RaySink:
    """A `SnapshotSink` that sends snapshots to the retrieval actor in pieces, on a thread of its own: through Ray's
    object store, or if `direct` from memory to memory by NIXL. A GPU copies them on a separate stream, so decoding goes
    on meanwhile.
    """

    def __init__(self, receiver: ActorHandle[Any], *, direct: bool = False) -> None:
        self.receiver, self.direct, self.piece_bytes = receiver, direct, PIECE_BYTES
        self.staging: PinnedStaging | None = None
        self.sending: dict[int, Future[None]] = {}  # by sequence id
        self.versions: dict[int, int] = {}  # confirmed versions by sequence id, oldest first
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="handover")

    # -- the engine's thread -------------------------------------------------------------------------------------------

    def deliver(self, snapshot: Snapshot) -> None:
        gathered = torch.cuda.Event() if snapshot.keys.is_cuda else None
        if gathered is not None:
            gathered.record()
        self.sending[snapshot.sequence_id] = self.executor.submit(self._send, snapshot, gathered)

    def busy(self, sequence_id: int) -> bool:
        self.sending = {i: future for i, future in self.sending.items() if not future.done()}
        return sequence_id in self.sending or len(self.sending) >= MAX_SENDING

    def confirmed(self, sequence_id: int) -> int:
        return self.versions.get(sequence_id, 0)

    # -- the sending thread --------------------------------------------------------------------------------------------

    def _send(self, snapshot: Snapshot, gathered: torch.cuda.Event | None) -> None:
        sequence_id, version = snapshot.sequence_id, snapshot.version
        try:
            if gathered is None:
                taken = self._send_pieces(snapshot)
            else:
                with torch.cuda.stream(torch.cuda.Stream(snapshot.keys.device)):
                    gathered.wait()
                    taken = self._send_pieces(snapshot)
            if not taken:  # damaged, changes to a version that the receiver lacks, or the sequence has finished
                log.info("snapshot %d of sequence %d was refused", version, sequence_id)
        except Exception as error:  # the retrieval tier is gone or late; it will request a snapshot again
            log.warning("snapshot %d of sequence %d was not delivered: %s", version, sequence_id, error)
            taken = False
        if taken:
            self.versions.pop(sequence_id, None)  # so that the new entry is the last
            self.versions[sequence_id] = version
            while len(self.versions) > MAX_CONFIRMED:
                self.versions.pop(next(iter(self.versions)), None)

    def _send_pieces(self, snapshot: Snapshot) -> bool:
        """Send the pieces, copying each while its predecessor is being sent; returns whether the snapshot was taken."""
        until = time.monotonic() + TIMEOUT_S
        waiting: deque[Any] = deque()
        answers: list[bool | None] = []  # pieces may be taken concurrently, so any answer may be the one that completes

        def receive() -> None:
            answers.append(ray.get(waiting.popleft(), timeout=max(0.0, until - time.monotonic())))

        with closing(self.pieces(snapshot)) as pieces:
            for piece in pieces:
                waiting.append(self.receiver.take_piece.remote(self.put(piece)))
                if len(waiting) > 1:
                    receive()
                if False in answers:
                    return False
        receive()
        return True in answers

    def pieces(self, snapshot: Snapshot) -> Generator[Piece]:
        """The pieces, each valid until the next piece is asked for."""
        if not self.direct and (self.staging is None or self.staging.buffer_bytes < self.piece_bytes):
            self.staging = PinnedStaging(snapshot.keys.device, self.piece_bytes)
        return cut_pieces(snapshot, self.piece_bytes, self.staging, on_device=self.direct)

    def put(self, piece: Piece) -> Any:
        """An object reference, which Ray resolves to the piece when it calls the receiver."""
        return ray.put(piece, _tensor_transport="nixl") if self.direct else ray.put(piece)


def sink_for(settings: RetrievalSettings, receiver: ActorHandle[Any]) -> RaySink:
    """The sink to a retrieval actor. Raises `InvalidValueError` if the transport of the settings is not installed."""
    direct = settings.transport == "rdt"
    there = not direct or importlib.util.find_spec("nixl") is not None
    require(there, "retrieval.transport", settings.transport, "needs NIXL: install the package `nixl`")
    return RaySink(receiver, direct=direct)
