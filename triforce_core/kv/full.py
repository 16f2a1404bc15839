"""The target's cache: every token's KV, exactly. It also cuts the snapshots that the retrieval tier works on."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from triforce_core.kv.base import Batch, Forward, Held, KVCache, Placement
from triforce_core.kv.ranges import Range, sliced
from triforce_core.kv.selectors import Selector
from triforce_core.kv.snapshot import Changes, ChunkSettings, Snapshot, arrange
from triforce_core.messages import SequenceSpec, Span

RECENT_QUERIES = 8  # rows of a prefill chunk whose queries are kept for selecting chunks; of a verify pass, all
LANDMARKED_TOGETHER = 1024  # chunks whose keys are copied together


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a snapshot has which chunk; after its chunks come the tokens from the last complete one to `position`."""

    chunks: Tensor  # [layers, kv_heads, places] int64
    chunk: int
    position: int


@dataclass(slots=True)
class FullHeld(Held):
    """Adds what selecting chunks needs: the queries of the last pass, and the landmarks of complete chunks so far."""

    query_positions: range = range(0)
    queries: list[Tensor | None] = field(default_factory=list)  # a layer: [heads, len(query_positions), head_dim]
    landmarks: list[Tensor | None] = field(default_factory=list)  # a layer: [kv_heads, chunks, …], beside its pool
    landmarked: int = 0  # tokens covered by landmarks
    snapshots_cut: int = 0
    layouts: dict[int, Layout] = field(default_factory=dict)  # of the latest snapshot and of its base, by version


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
        """Hold KV up to the end of `span`, of what is missing drawn from a normal law: for benchmarks of passes over a
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

    # -- snapshots -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def cut(
        self, sequence_id: int, position: int, chunks: ChunkSettings, selector: Selector, base: int = 0
    ) -> Snapshot:
        """A sparse copy of the sequence's KV below `position`, which must be settled and held: the chunks that the last
        query before it attends to most, chosen per layer and KV head, the first chunk and the local window among them.

        As changes to the snapshot of version `base` where that is the latest one or the latest one's own base; else
        whole, its chunks in the order of the text.
        """
        held = self.held[sequence_id]
        assert position <= held.cached, "a snapshot is cut of settled KV"
        slots = self._slots(held, position)
        chosen = self._choose(held, position, chunks, selector, slots)
        before = held.layouts.get(base)
        if before is not None and (before.position > position or before.chunk != chunks.chunk):
            before = None
        known = chosen[..., :0] if before is None else before.chunks
        complete = position // chunks.chunk
        arranged, fresh = arrange(known, chosen, complete)
        kept = min(known.shape[-1], chosen.shape[-1])
        offsets = torch.arange(chunks.chunk, device=slots.device)
        tokens = (arranged[..., kept:, None] * chunks.chunk + offsets).flatten(2)
        rest = torch.arange(complete * chunks.chunk, position, device=slots.device).expand(*tokens.shape[:2], -1)
        changes = None
        if before is not None:
            replaced = fresh[..., :kept]
            new = arranged[..., :kept][replaced]
            changes = self._changes(base, kept * chunks.chunk, replaced.nonzero(), new, chunks.chunk, slots)
        layout = Layout(arranged, chunks.chunk, position)
        return self._snapshot(sequence_id, layout, torch.cat([tokens, rest], dim=2), slots, changes)

    def _choose(
        self, held: FullHeld, position: int, chunks: ChunkSettings, selector: Selector, slots: Tensor
    ) -> Tensor:
        """The complete chunks of a snapshot, [layers, kv_heads, chunks] int64, ascending."""
        layers, kv_heads = self.geometry.num_layers, self.geometry.num_kv_heads
        local_start, num_chosen = chunks.split(position)
        first_local = local_start // chunks.chunk
        local = torch.arange(first_local, position // chunks.chunk, device=slots.device).expand(layers, kv_heads, -1)
        if num_chosen == first_local:  # all fit
            return torch.arange(position // chunks.chunk, device=slots.device).expand(layers, kv_heads, -1)
        best = []
        for layer in range(layers):
            scores = self._scores(held, layer, position, local_start, chunks, selector, slots)
            scores[:, 0] = torch.inf  # the attention sinks
            best.append(scores.topk(num_chosen, dim=-1).indices.sort(-1).values)
        held.landmarked = max(held.landmarked, local_start)
        return torch.cat([torch.stack(best), local], dim=2)

    def _changes(self, base: int, kept: int, places: Tensor, chunks: Tensor, chunk: int, slots: Tensor) -> Changes:
        """`kept` tokens stay, but `chunks` [replaced] come to `places` [replaced, (layer, kv_head, place)]."""
        layers, kv_heads = places[:, 0], places[:, 1]
        tokens = slots[chunks[:, None] * chunk + torch.arange(chunk, device=slots.device)]  # [replaced, chunk]
        out = self._empty(len(places), chunk)
        first = 0
        for layer, count in enumerate(torch.bincount(layers, minlength=self.geometry.num_layers).tolist()):
            rows = slice(first, first + count)
            out[0, rows] = self._read(self.keys[layer], kv_heads[rows, None], tokens[rows])
            out[1, rows] = self._read(self.values[layer], kv_heads[rows, None], tokens[rows])
            first = rows.stop
        flat = (layers * self.geometry.num_kv_heads + kv_heads) * (kept // chunk) + places[:, 2]
        return Changes(base, kept, flat.int(), keys=out[0], values=out[1])

    def _snapshot(
        self, sequence_id: int, layout: Layout, tokens: Tensor, slots: Tensor, changes: Changes | None
    ) -> Snapshot:
        """`changes`, and the KV of `tokens` [layers, kv_heads, tokens] after them; it is the sequence's latest."""
        held = self.held[sequence_id]
        out = self._empty(*tokens.shape)
        kv_heads = torch.arange(self.geometry.num_kv_heads, device=slots.device)[:, None]
        for layer in range(self.geometry.num_layers):
            out[0, layer] = self._read(self.keys[layer], kv_heads, slots[tokens[layer]])
            out[1, layer] = self._read(self.values[layer], kv_heads, slots[tokens[layer]])
        held.snapshots_cut += 1
        base = {changes.base: held.layouts[changes.base]} if changes else {}
        held.layouts = {**base, held.snapshots_cut: layout}
        return Snapshot(sequence_id, held.snapshots_cut, layout.position, out[0], out[1], changes)

    def _read(self, pool: Tensor, kv_heads: Tensor, slots: Tensor) -> Tensor:
        """A copy of keys or values of a layer, [*shape, head_dim], where its pool lies: not always the device.

        `kv_heads` and `slots` broadcast to `shape`.
        """
        return pool[kv_heads.to(pool.device), slots.to(pool.device)]

    def _empty(self, *shape: int) -> Tensor:
        """For keys and values of this shape but the last dimension."""
        shape = (2, *shape, self.geometry.head_dim)
        return torch.empty(shape, dtype=self.geometry.dtype, device=self.geometry.device)

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
            new = self._landmarks(layer, chunks.chunk, selector, slots[known * chunks.chunk : local_start])
            landmarks = new if landmarks is None or not known else torch.cat([landmarks, new], dim=1)
        assert landmarks is not None
        held.landmarks[layer] = landmarks
        queries = held.queries[layer]
        assert queries is not None
        usable = max(1, position - held.query_positions.start)  # later ones saw tokens that were not accepted
        return selector.scores(queries[:, :usable], landmarks[:, : local_start // chunks.chunk].to(queries.device))

    def _landmarks(self, layer: int, chunk: int, selector: Selector, slots: Tensor) -> Tensor:
        """Of the chunks in `slots`, [kv_heads, chunks, …] where the layer's pool lies. Copies few keys at a time."""
        kv_heads = torch.arange(self.geometry.num_kv_heads, device=slots.device)[:, None]
        keys = (self._read(self.keys[layer], kv_heads, few) for few in slots.split(LANDMARKED_TOGETHER * chunk))
        return torch.cat([selector.landmarks(few.unflatten(1, (-1, chunk))) for few in keys], dim=1)
