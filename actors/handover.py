"""KV hand-over: snapshots from the target to the retrieval tier in checked pieces, off the token path.

Pieces go through Ray's object store, or straight from one tier's memory to the other's by Ray Direct Transport (RDT).
Of RDT's transports only NIXL is of use here: it is one-sided, and what fails of it fails alone. When a transfer by gloo
or NCCL fails, Ray 2.60 kills both actors, and a target must not die because a drafting tier did.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.actor import ActorHandle
from torch import Tensor

from triforce_core.config import RetrievalSettings
from triforce_core.errors import require
from triforce_core.kv.snapshot import Changes, Snapshot

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0  # for all pieces of a snapshot
PIECE_BYTES = 64 * 2**20  # of a snapshot at a time: while one piece is on its way the next is copied off the device
MAX_SENDING = 16  # snapshots, on their way and queued: they are memory of the target's device
MAX_CONFIRMED = 4096  # sequences whose confirmed version is remembered


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a snapshot consists of; every piece carries it, so that they may come in any order."""

    sequence_id: int
    version: int
    position: int
    base: int  # of the changes; 0: whole
    kept: int
    dtypes: tuple[str, ...]  # of `Snapshot.tensors`
    shapes: tuple[tuple[int, ...], ...]  # same
    num_pieces: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of one tensor: numpy for the object store, a tensor for RDT. Bytes, because numpy has no bfloat16."""

    manifest: Manifest
    index: int
    tensor: int  # index in `Snapshot.tensors`
    first: int  # byte
    data: NDArray[np.uint8] | Tensor
    checksum: int

    @property
    def sound(self) -> bool:
        return self.checksum == checksum(self.data, (self.manifest, self.index, self.tensor, self.first))


def checksum(data: NDArray[np.uint8] | Tensor, about: tuple[object, ...]) -> int:
    """CRC-32 of what the bytes are about and of the bytes; of those on a GPU, of sums that it computes in one pass."""
    crc = zlib.crc32(repr(about).encode())
    if isinstance(data, Tensor):
        if data.is_cuda:
            padded = torch.nn.functional.pad(data, (0, -len(data) % 4096)).unflatten(0, (-1, 4096))
            sums = padded.sum(1, dtype=torch.int64)
            places = torch.arange(1, len(sums) + 1, device=data.device)
            return zlib.crc32(repr((sums.sum().item(), (sums * places).sum().item())).encode(), crc)
        data = data.numpy()
    return zlib.crc32(data.data, crc)


def cut_pieces(snapshot: Snapshot, piece_bytes: int, *, on_device: bool = False) -> Iterator[Piece]:
    """The snapshot in pieces of at most `piece_bytes`, each copied to the host (unless `on_device`) when it is due."""
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
    for index, (i, first) in enumerate(spans):
        data = tensors[i][first : first + piece_bytes]
        payload = data if on_device else data.cpu().numpy()
        yield Piece(manifest, index, i, first, payload, checksum(payload, (manifest, index, i, first)))


@dataclass(slots=True)
class Assembly:
    """One version of one sequence's snapshot, as far as it has arrived."""

    manifest: Manifest
    buffers: list[Tensor]  # bytes of `Snapshot.tensors`
    missing: set[int]  # pieces

    @classmethod
    def of(cls, piece: Piece) -> Assembly:
        device = piece.data.device if isinstance(piece.data, Tensor) else "cpu"
        manifest = piece.manifest
        sizes = [
            getattr(torch, dtype).itemsize * int(np.prod(shape))
            for dtype, shape in zip(manifest.dtypes, manifest.shapes, strict=True)
        ]
        buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        return cls(manifest, buffers, set(range(manifest.num_pieces)))

    def add(self, piece: Piece) -> None:
        into = self.buffers[piece.tensor][piece.first : piece.first + len(piece.data)]
        if isinstance(piece.data, Tensor):
            into.copy_(piece.data)
        else:
            into.numpy()[:] = piece.data
        self.missing.discard(piece.index)

    def snapshot(self, device: str) -> Snapshot:
        m = self.manifest
        keys, values, *more = (
            buffer.view(getattr(torch, dtype)).view(shape).to(device)
            for buffer, dtype, shape in zip(self.buffers, m.dtypes, m.shapes, strict=True)
        )
        changes = Changes(m.base, m.kept, *more) if more else None
        return Snapshot(m.sequence_id, m.version, m.position, keys, values, changes)


class SnapshotTaker(Protocol):
    """Where whole snapshots go."""

    def take(self, snapshot: Snapshot) -> bool:
        """False: refused."""
        ...

    def confirmed(self, sequence_id: int) -> int:
        """The latest version that was taken; 0: none."""
        ...

    def is_live(self, sequence_id: int) -> bool:
        """False: the sequence is over."""
        ...


class SnapshotReceiver:
    """Puts snapshots together, one version of a sequence and `max_sequences` in all; hands on whole ones only. What is
    there of a sequence that is over goes when the next piece comes, whosever it is.

    `take_piece` may be called from any thread.
    """

    def __init__(self, taker: SnapshotTaker, device: str, max_sequences: int) -> None:
        self.taker, self.device, self.max_sequences = taker, device, max_sequences
        self.assemblies: dict[int, Assembly] = {}  # by sequence id, oldest first
        self.lock = threading.Lock()

    def take_piece(self, piece: Piece) -> bool | None:
        """True: the snapshot is here, whole. False: this version is refused, for a piece of it is damaged, a newer one
        has come, it changes one that is not here, or its sequence is over. None: other pieces are missing.
        """
        sequence_id, version = piece.manifest.sequence_id, piece.manifest.version
        sound = piece.sound
        with self.lock:
            self.assemblies = {i: each for i, each in self.assemblies.items() if self.taker.is_live(i)}
            if not self.taker.is_live(sequence_id):
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
                self.assemblies.pop(sequence_id, None)  # to stand last
                assembly = self.assemblies[sequence_id] = Assembly.of(piece)
                while len(self.assemblies) > self.max_sequences:
                    del self.assemblies[next(iter(self.assemblies))]
            assembly.add(piece)
            if assembly.missing:
                return None
            del self.assemblies[sequence_id]
            return self.taker.take(assembly.snapshot(self.device))


class RaySink(ABC):
    """A `SnapshotSink`: one thread cuts snapshots into pieces and has the retrieval actor take them.

    The engine's thread only queues. A GPU copies on a stream of its own, so that decoding goes on meanwhile.
    """

    def __init__(self, receiver: ActorHandle[Any]) -> None:
        self.receiver, self.piece_bytes = receiver, PIECE_BYTES
        self.sending: dict[int, Future[None]] = {}  # by sequence id
        self.versions: dict[int, int] = {}  # confirmed, by sequence id, oldest first
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
            if not taken:  # damaged, or changes to what is not there: also when the sequence was released meanwhile
                log.info("snapshot %d of sequence %d was refused", version, sequence_id)
        except Exception as error:  # the retrieval tier is gone or late: it will ask again
            log.warning("snapshot %d of sequence %d was not delivered: %s", version, sequence_id, error)
            taken = False
        if taken:
            self.versions.pop(sequence_id, None)  # to stand last
            self.versions[sequence_id] = version
            while len(self.versions) > MAX_CONFIRMED:
                self.versions.pop(next(iter(self.versions)), None)

    def _send_pieces(self, snapshot: Snapshot) -> bool:
        """One piece after another, the next being copied while the last is on its way; True once all is taken."""
        until = time.monotonic() + TIMEOUT_S
        waiting: deque[Any] = deque()
        answers: list[bool | None] = []  # of several that are taken at the same time, any may be the one that completes

        def receive() -> None:
            answers.append(ray.get(waiting.popleft(), timeout=max(0.0, until - time.monotonic())))

        for piece in self.pieces(snapshot):
            waiting.append(self.receiver.take_piece.remote(self.put(piece)))
            if len(waiting) > 1:
                receive()
            if False in answers:
                return False
        receive()
        return True in answers

    def pieces(self, snapshot: Snapshot) -> Iterator[Piece]:
        return cut_pieces(snapshot, self.piece_bytes)

    @abstractmethod
    def put(self, piece: Piece) -> Any:
        """Something that Ray turns into the piece where the receiver is called."""


class ObjectStoreSink(RaySink):
    """Through Ray's object store, in shared memory and over the network."""

    def put(self, piece: Piece) -> Any:
        return ray.put(piece)


class RdtSink(RaySink):
    """From memory to memory by NIXL, on GPUs without passing through the host's."""

    def pieces(self, snapshot: Snapshot) -> Iterator[Piece]:
        return cut_pieces(snapshot, self.piece_bytes, on_device=True)

    def put(self, piece: Piece) -> Any:
        return ray.put(piece, _tensor_transport="nixl")


TRANSPORTS: dict[str, type[RaySink]] = {"object_store": ObjectStoreSink, "rdt": RdtSink}


def sink_for(settings: RetrievalSettings, receiver: ActorHandle[Any]) -> RaySink:
    """What takes snapshots to `receiver`, a retrieval actor.

    Raises `InvalidValueError` where the transport is not installed.
    """
    there = settings.transport != "rdt" or importlib.util.find_spec("nixl") is not None
    require(there, "retrieval.transport", settings.transport, "needs NIXL: install the package `nixl`")
    return TRANSPORTS[settings.transport](receiver)
