"""The target's cache: every token's KV, exactly. It also cuts the snapshots that the retrieval tier works on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from triforce_core.kv.base import Batch, Held, KVCache, Placement
from triforce_core.kv.ranges import Range, sliced
from triforce_core.kv.selectors import Selector
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.messages import SequenceSpec

RECENT_QUERIES = 8  # rows of a prefill chunk whose queries are kept for selecting chunks; of a verify pass, all


@dataclass(slots=True)
class FullHeld(Held):
    """Adds what selecting chunks needs: the queries of the last pass, and the landmarks of complete chunks so far."""

    query_positions: range = range(0)
    queries: list[Tensor | None] = field(default_factory=list)  # a layer: [heads, len(query_positions), head_dim]
    landmarks: list[Tensor | None] = field(default_factory=list)  # a layer: [kv_heads, chunks, …]
    landmarked: int = 0  # tokens covered by landmarks
    snapshots_cut: int = 0


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

    # -- snapshots -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def cut(self, sequence_id: int, position: int, chunks: ChunkSettings, selector: Selector) -> Snapshot:
        """A sparse copy of the sequence's KV below `position`, which must be settled and held: the chunks that the last
        query before it attends to most, chosen per layer and KV head, the first chunk and the local window among them.
        """
        held = self.held[sequence_id]
        assert position <= held.cached, "a snapshot is cut of settled KV"
        local_start, num_chosen = chunks.split(position)
        fits = num_chosen * chunks.chunk == local_start
        slots = self._slots(held, position)
        length = position - local_start + num_chosen * chunks.chunk
        shape = (self.geometry.num_layers, self.geometry.num_kv_heads, length, self.geometry.head_dim)
        out = torch.empty(2, *shape, dtype=self.geometry.dtype, device=self.geometry.device)
        for layer in range(self.geometry.num_layers):
            if fits:
                chosen = slots[:position].expand(self.geometry.num_kv_heads, -1)
            else:
                scores = self._scores(held, layer, position, local_start, chunks, selector, slots)
                scores[:, 0] = torch.inf  # the attention sinks
                best = scores.topk(num_chosen, dim=-1).indices.sort(-1).values  # [kv_heads, num_chosen]
                offsets = torch.arange(chunks.chunk, device=best.device)
                tokens = (best.unsqueeze(-1) * chunks.chunk + offsets).flatten(1)
                local = slots[local_start:position].expand(len(best), -1)
                chosen = torch.cat([slots[tokens], local], dim=1)
            index = chosen.unsqueeze(-1).expand(-1, -1, self.geometry.head_dim)
            torch.gather(self.keys[layer], 1, index, out=out[0, layer])
            torch.gather(self.values[layer], 1, index, out=out[1, layer])
        if not fits:
            held.landmarked = max(held.landmarked, local_start)
        held.snapshots_cut += 1
        return Snapshot(sequence_id, held.snapshots_cut, position, keys=out[0], values=out[1])

    def _slots(self, held: FullHeld, stop: int) -> Tensor:
        """The pool slot of each of the first `stop` tokens, [stop] int64."""
        ranges = sliced(held.ranges, 0, stop)
        device = self.geometry.device
        return torch.cat([torch.arange(a, b, device=device) for a, b in ranges] or [torch.arange(0, device=device)])

    def _scores(
        self,
        held: FullHeld,
        layer: int,
        position: int,
        local_start: int,
        chunks: ChunkSettings,
        selector: Selector,
        slots: Tensor,
    ) -> Tensor:
        """How much the queries before `position` want each chunk below `local_start`, [kv_heads, chunks] float32."""
        known, landmarks = held.landmarked // chunks.chunk, held.landmarks[layer]
        if landmarks is not None:
            landmarks = landmarks[:, :known]
        if known * chunks.chunk < local_start:
            fresh = self.keys[layer][:, slots[known * chunks.chunk : local_start]]
            new = selector.landmarks(fresh.unflatten(1, (-1, chunks.chunk)))
            landmarks = new if landmarks is None or not known else torch.cat([landmarks, new], dim=1)
        assert landmarks is not None
        held.landmarks[layer] = landmarks
        queries = held.queries[layer]
        assert queries is not None
        usable = max(1, position - held.query_positions.start)  # later ones saw tokens that were not accepted
        return selector.scores(queries[:, :usable], landmarks[:, : local_start // chunks.chunk])
