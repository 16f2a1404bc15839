"""KV hand-over: snapshots from the target to the retrieval tier through Ray's object store, off the token path."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.actor import ActorHandle
from torch import Tensor

from triforce_core.kv.snapshot import Snapshot

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
MAX_WAITING = 16  # snapshots, on their way and queued


@dataclass(frozen=True, slots=True)
class PackedSnapshot:
    """A snapshot as Ray carries it: numpy has no bfloat16, so KV travels as the integers of the same width."""

    sequence_id: int
    version: int
    position: int
    dtype: str
    keys: NDArray[np.integer]  # [layers, kv_heads, tokens, head_dim]
    values: NDArray[np.integer]


INTEGERS = {2: torch.int16, 4: torch.int32}


def pack(snapshot: Snapshot) -> PackedSnapshot:
    def as_integers(tensor: Tensor) -> NDArray[np.integer]:
        return tensor.cpu().view(INTEGERS[tensor.dtype.itemsize]).numpy()

    name = str(snapshot.keys.dtype).removeprefix("torch.")
    keys, values = as_integers(snapshot.keys), as_integers(snapshot.values)
    return PackedSnapshot(snapshot.sequence_id, snapshot.version, snapshot.position, name, keys, values)


def unpack(packed: PackedSnapshot, device: str) -> Snapshot:
    def as_floats(array: NDArray[np.integer]) -> Tensor:
        # A copy: what comes out of the object store is read-only and pins its memory there.
        return torch.from_numpy(array.copy()).view(getattr(torch, packed.dtype)).to(device)

    return Snapshot(
        packed.sequence_id, packed.version, packed.position, as_floats(packed.keys), as_floats(packed.values)
    )


class ObjectStoreSink:
    """A `SnapshotSink`: one thread puts snapshots into the object store and has the retrieval actor take them."""

    def __init__(self, receiver: ActorHandle[Any]) -> None:
        self.receiver = receiver
        self.sending: dict[int, Future[None]] = {}  # by sequence id
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="handover")

    def deliver(self, snapshot: Snapshot) -> None:
        self.sending = {i: future for i, future in self.sending.items() if not future.done()}
        while len(self.sending) >= MAX_WAITING:  # the receiver hangs: what is oldest is wanted least
            self.sending.pop(next(iter(self.sending))).cancel()
        self.sending[snapshot.sequence_id] = self.executor.submit(self._send, snapshot)

    def in_flight(self, sequence_id: int) -> bool:
        future = self.sending.get(sequence_id)
        return future is not None and not future.done()

    def _send(self, snapshot: Snapshot) -> None:
        try:
            ray.get(self.receiver.take_snapshot.remote(ray.put(pack(snapshot))), timeout=TIMEOUT_S)
        except Exception as error:  # the retrieval tier is gone or late: it will ask again
            log.warning(
                "snapshot %d of sequence %d was not delivered: %s", snapshot.version, snapshot.sequence_id, error
            )
