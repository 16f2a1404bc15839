"""The full cache when the device cannot hold it: KV lies in host memory or in a file and is copied layer by layer.

Two layers at a time are staged on the device: the layer that computes, and the next one, which is copied meanwhile. A
staging buffer has as many slots as a layer's pool, so that attention is the same on both; only the slots that the batch
sees are copied. docs/decisions/0013-offload.md
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triforce_core.attention import Kernel, Scoring
from triforce_core.attention.blocks import BLOCK
from triforce_core.errors import require
from triforce_core.kv.base import Batch, Forward, KVGeometry, Row, joined
from triforce_core.kv.copy_stream import StreamEvent, copy_slots, copy_stream
from triforce_core.kv.full import FullKV
from triforce_core.kv.pinned import PinnedStaging, lock
from triforce_core.kv.ranges import Range, rounded_up, sliced, union
from triforce_core.kv.selectors import Selector
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.machine.memory import gib, mapped

NUM_STAGED = 2  # layers


@dataclass(frozen=True, slots=True)
class Offload:
    """Which layers keep their KV off the device, and where."""

    resident_layers: int = 0  # how many of the first layers keep their KV on the device
    directory: Path | None = None  # directory of the KV file for the other layers; None: host memory

    def num_staged(self, geometry: KVGeometry) -> int:
        return min(NUM_STAGED, geometry.num_layers - self.resident_layers)

    def kv_bytes(self, geometry: KVGeometry, pool_tokens: int) -> tuple[int, int]:
        """The bytes of KV on the device, staging included, and the bytes elsewhere."""
        layer_bytes = geometry.bytes_per_token // geometry.num_layers * pool_tokens
        on_device = self.resident_layers + self.num_staged(geometry)
        return on_device * layer_bytes, (geometry.num_layers - self.resident_layers) * layer_bytes


@dataclass(slots=True)
class Staging:
    """A buffer on the device that holds one offloaded layer at a time."""

    pool: Tensor  # [2, kv_heads, pool_tokens, head_dim]
    attended: StreamEvent  # the attention of the previous layer in this buffer
    fetched: StreamEvent = None  # the copy of the next layer's visible slots into this buffer


class OffloadedKV(FullKV):
    """From layer `resident_layers` on, `keys` and `values` lie in host memory or in the file, not on the device."""

    def __init__(
        self, geometry: KVGeometry, pool_tokens: int, kernel: Kernel, offload: Offload, **options: Any
    ) -> None:
        """`options`: as those of `FullKV`.

        Raises `InvalidValueError` if the KV file cannot be made or host memory cannot be locked.
        """
        pool_tokens = rounded_up(pool_tokens, options.get("unit", 1))
        assert offload.resident_layers < geometry.num_layers, "something is offloaded"
        resident = geometry.new_pool(pool_tokens, offload.resident_layers)
        shape = (geometry.num_layers - len(resident), *resident.shape[1:])
        if offload.directory is None:
            self.host = torch.empty(shape, dtype=geometry.dtype, device="cpu")
        else:
            self.host = mapped(offload.directory, shape, geometry.dtype)
        super().__init__(geometry, pool_tokens, kernel, [resident, self.host], **options)
        self.resident_layers = offload.resident_layers
        self.stream, self.copies = copy_stream(geometry.device), PinnedStaging(geometry.device)
        staged = geometry.new_pool(pool_tokens, offload.num_staged(geometry))
        self.staging = [Staging(pool, self.stream.computed()) for pool in staged]
        if geometry.device.type == "cuda" and offload.directory is None:
            status = lock(self.host, self)
            rule = f"cannot lock {gib(self.host.nbytes)} of memory, CUDA error {status}: lower target.kv_pool_tokens"
            require(status == 0, "target.offload", "host", rule)

    def prepare(self, forwards: list[Forward]) -> Batch:
        """Also start copying the first offloaded layers to the device."""
        batch = super().prepare(forwards)
        for layer in range(self.resident_layers, self.resident_layers + len(self.staging)):
            self._fetch(layer, batch)
        return batch

    def on_device(self, layer: int) -> tuple[Tensor, Tensor]:
        if layer < self.resident_layers:
            return super().on_device(layer)
        keys, values = self._staging(layer).pool
        return keys, values

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, batch: Batch) -> Tensor:
        """Attend on the staged layer. It cannot be captured in a graph, because each pass copies other slots."""
        if layer < self.resident_layers:
            return super().attend(layer, query, keys, values, scoring, batch)
        staging = self._staging(layer)
        self.stream.compute_after(staging.fetched)
        output = super().attend(layer, query, keys, values, scoring, batch)
        staging.attended = self.stream.computed()
        self._keep(layer, batch)
        following = layer + len(self.staging)
        if following < self.geometry.num_layers:
            self._fetch(following, batch)
        return output

    def _text_of(self, row: Row) -> list[Range]:
        """Without slots behind the text: there a staging buffer has what other layers and texts have left."""
        return joined(row.placed.visible, row.placed.writes)

    def _staging(self, layer: int) -> Staging:
        return self.staging[(layer - self.resident_layers) % len(self.staging)]

    def _fetch(self, layer: int, batch: Batch) -> None:
        """Start copying the slots that the batch sees, once each, after the buffer's previous layer has attended. Of a
        layer with a window, the blocks that it reaches.
        """
        staging, window = self._staging(layer), self.geometry.windows.of(layer)
        seen = []
        for row in batch.rows:
            position = row.placed.positions.start
            first = 0 if window is None else max(0, position - window + 1) // BLOCK * BLOCK
            seen += sliced(row.placed.visible, first, position)
        visible = union(seen)
        with self.stream.copying(after=staging.attended):
            copy_slots(self.host[layer - self.resident_layers], staging.pool, visible)
        staging.fetched = self.stream.copied()

    def _keep(self, layer: int, batch: Batch) -> None:
        """Start copying the layer's new KV from its staging buffer to the host."""
        staging = self._staging(layer)
        with self.stream.copying(after=staging.attended):
            for row in batch.rows:
                copy_slots(staging.pool, self.host[layer - self.resident_layers], row.placed.writes)

    def _copy(self, sources: list[Range], targets: list[Range]) -> None:
        self.stream.wait()  # KV of the last pass may still be on its way to the host
        super()._copy(sources, targets)

    def cut(
        self, sequence_id: int, position: int, chunks: ChunkSettings, selector: Selector, base: int = 0
    ) -> Snapshot:
        self.stream.wait()  # KV of the last pass may still be on its way to the host
        return super().cut(sequence_id, position, chunks, selector, base)

    def read(self, layers: Tensor, kv_heads: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gathered on the host, because the link to the device is slower than the memory of the host."""
        resident, geometry = self.resident_layers, self.geometry
        own = len((layers < resident).nonzero()) if resident else 0
        here, there = self.pools[0].flatten(0, 3), self.host.flatten(0, 3)
        rows, behind = self.rows(layers, kv_heads, slots)
        keys = torch.empty(*rows.shape, geometry.head_dim, dtype=geometry.dtype, device=geometry.device)
        found = keys, torch.empty_like(keys)
        on_host = (rows[own:] - len(here)).flatten()
        if there.device.type != geometry.device.type:
            on_host = self.copies.numbers(on_host)
        for into, offset in zip(found, (0, behind), strict=True):
            torch.index_select(here, 0, (rows[:own] + offset).flatten(), out=into[:own].flatten(0, -2))
            if there.device.type == geometry.device.type:
                torch.index_select(there, 0, on_host + offset, out=into[own:].flatten(0, -2))
            else:
                self.copies.gather(there, on_host + offset, into[own:].flatten(0, -2))
        return found

    def moved(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == self.geometry.device.type:
            return tensor
        return self.copies.upload(tensor)
