"""The target's cache: every token's KV, exactly. kv/cutting.py cuts the snapshots that the retrieval tier works on."""

from __future__ import annotations

import torch
from torch import Tensor

from triforce_core.kv.base import Batch, Forward, Held, KVCache, Placement
from triforce_core.kv.cutting import FullHeld, SnapshotCutter
from triforce_core.kv.ranges import Range, sliced
from triforce_core.kv.selectors import Selector
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.messages import SequenceSpec, Span

RECENT_QUERIES = 8  # rows of a prefill chunk whose queries are kept for selecting chunks; of a verify pass, all


class FullKV(KVCache):
    """A sequence reserves slots for its whole length when it is opened, so that growth never fails."""

    held: dict[int, FullHeld]  # type: ignore[assignment]

    def new_held(self, spec: SequenceSpec, ranges: list[Range]) -> FullHeld:
        layers = self.geometry.num_layers
        return FullHeld(spec, ranges=ranges, queries=[None] * layers, landmarks=[None] * layers)

    def slots_for(self, spec: SequenceSpec) -> int:
        return spec.max_length

    def place(self, sequence_id: int, held: Held, keep: int, end: int, num_sampled: int) -> Placement:
        assert isinstance(held, FullHeld)
        held.cached = end
        held.landmarked = min(held.landmarked, keep)
        if keep < end:
            held.query_positions = range(max(keep, end - max(RECENT_QUERIES, num_sampled)), end)
        return Placement(
            tokens=held.tokens[keep:end],
            positions=range(keep, end),
            writes=sliced(held.ranges, keep, end),
            visible=sliced(held.ranges, 0, keep),
        )

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, batch: Batch) -> Tensor:
        for row in batch.rows:
            held = self.held[row.sequence_id]
            held.queries[layer] = query[:, row.stop - len(held.query_positions) : row.stop].clone()
        return super().attend(layer, query, keys, values, scale, batch)

    @torch.inference_mode()
    def fill(self, span: Span) -> None:
        """Hold KV up to the end of `span`, missing KV drawn from a normal distribution: for benchmarks of passes over a
        long context, whose times do not depend on what stands in it. The sequence is open, or begins with the span.
        """
        placed = self._align(Forward(span, num_sampled=0))
        assert isinstance(placed, Placement)
        held = self.held[span.sequence_id]
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            for start, stop in placed.writes:
                for head in (*keys[:, start:stop], *values[:, start:stop]):  # contiguous: five times as fast on a CPU
                    head.normal_()
            shape = len(keys), len(held.query_positions), keys.shape[-1]  # on the device, wherever the pool lies
            held.queries[layer] = torch.empty(shape, dtype=keys.dtype, device=self.geometry.device).normal_()

    @torch.inference_mode()
    def cut(
        self, sequence_id: int, position: int, chunks: ChunkSettings, selector: Selector, base: int = 0
    ) -> Snapshot:
        """A sparse copy of the sequence's KV below `position`, which must be settled and held: the chunks that the last
        query before it attends to most, chosen per layer and KV head, the first chunk and the local window among them.

        As changes to the snapshot of version `base` where that is the latest one or the latest one's own base; else
        whole, its chunks in the order of the text.
        """
        return SnapshotCutter(self, self.held[sequence_id], position, chunks, selector).cut(sequence_id, base)

    def read(self, pool: Tensor, kv_heads: Tensor, slots: Tensor) -> Tensor:
        """A copy of keys or values of a layer, [*shape, head_dim], where its pool lies: not always the device.

        `kv_heads` and `slots` broadcast to `shape`.
        """
        return pool[kv_heads.to(pool.device), slots.to(pool.device)]
