"""Cutting snapshots of the full cache: selects chunks for the retrieval tier and copies their KV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from triforce_core.kv.base import KVGeometry
from triforce_core.kv.full_held import FullHeld, Layout
from triforce_core.kv.landmarks import READ_TOGETHER, LandmarkPool
from triforce_core.kv.mass import with_more
from triforce_core.kv.ranges import sliced
from triforce_core.kv.selectors import Landmark, Selector
from triforce_core.kv.snapshot import Changes, ChunkSettings, Snapshot, arrange


class Pools(Protocol):
    """The parts of the full cache that cutting reads."""

    geometry: KVGeometry
    keys: list[Tensor]  # per layer: [kv_heads, pool_tokens, head_dim], on the device or elsewhere
    values: list[Tensor]  # same
    landmarks: LandmarkPool | None

    def read(self, pool: Tensor, kv_heads: Tensor, slots: Tensor) -> Tensor:
        """A copy of keys or values of a layer, [*shape, head_dim], on the device that computes.

        `kv_heads` and `slots` broadcast to `shape`.
        """
        ...

    def moved(self, tensor: Tensor) -> Tensor:
        """A part of a pool, or what was computed of it, on the device that computes."""
        ...


class SnapshotCutter:
    """Cuts one snapshot of one sequence. Records its layout in `held`, so that the next can state changes to it."""

    def __init__(self, pools: Pools, held: FullHeld, position: int, chunks: ChunkSettings, selector: Selector) -> None:
        """`position`: the snapshot covers the KV below it, which must be settled and held."""
        assert position <= held.cached, "a snapshot is cut of settled KV"
        self.pools, self.held, self.position, self.settings, self.selector = pools, held, position, chunks, selector
        self.geometry, self.chunk = pools.geometry, chunks.chunk
        device = self.geometry.device
        ranges = [torch.arange(start, stop, device=device) for start, stop in sliced(held.ranges, 0, position)]
        self.slots = torch.cat(ranges or [torch.arange(0, device=device)])  # the slot of each token, [position] int64

    def cut(self, sequence_id: int, base: int) -> Snapshot:
        """Cut the snapshot, which becomes the sequence's latest. It states changes to version `base` if that version's
        layout is known and fits; otherwise it is whole, with its chunks in the order of the text.
        """
        chosen = self.choose()
        before = self._layout_before(base)
        known = chosen[..., :0] if before is None else before.chunks
        complete = self.position // self.chunk
        arranged, fresh = arrange(known, chosen, complete)
        kept = min(known.shape[-1], chosen.shape[-1])
        changes = None
        if before is not None:
            replaced = fresh[..., :kept]
            changes = self._changes(base, kept * self.chunk, replaced.nonzero(), arranged[..., :kept][replaced])
        offsets = torch.arange(self.chunk, device=self.slots.device)
        tokens = (arranged[..., kept:, None] * self.chunk + offsets).flatten(2)
        rest = torch.arange(complete * self.chunk, self.position, device=self.slots.device)
        keys, values = self._copy(torch.cat([tokens, rest.expand(*tokens.shape[:2], -1)], dim=2))
        version = self._remember(Layout(arranged, self.chunk, self.position), changes)
        return Snapshot(sequence_id, version, self.position, keys, values, changes)

    def _layout_before(self, base: int) -> Layout | None:
        """The layout of version `base`; None if changes to it cannot be stated, because it is forgotten, covers a
        longer text, or has chunks of another size.
        """
        before = self.held.layouts.get(base)
        if before is not None and (before.position > self.position or before.chunk != self.chunk):
            return None
        return before

    def _remember(self, layout: Layout, changes: Changes | None) -> int:
        """Remember this layout and return its new version. The next snapshot may state changes to it or to its base."""
        held = self.held
        held.snapshots_cut += 1
        base = {changes.base: held.layouts[changes.base]} if changes else {}
        held.layouts = {**base, held.snapshots_cut: layout}
        return held.snapshots_cut

    # -- which chunks ----------------------------------------------------------------------------------------------

    def choose(self) -> Tensor:
        """The complete chunks of the snapshot, [layers, kv_heads, chunks] int64, ascending: the first chunk, the chunks
        of the recent window, and those that the selector ranks highest, chosen per layer and KV head.
        """
        layers, kv_heads = self.geometry.num_layers, self.geometry.num_kv_heads
        local_start, num_chosen = self.settings.split(self.position)
        first_local, complete = local_start // self.chunk, self.position // self.chunk
        if num_chosen == first_local:  # all fit
            return torch.arange(complete, device=self.slots.device).expand(layers, kv_heads, -1)
        best = []
        for layer in range(layers):
            scores = self.selector.scores(LayerChunks(self, layer, first_local))
            scores[:, 0] = torch.inf  # the attention sinks
            best.append(scores.topk(num_chosen, dim=-1).indices.sort(-1).values)
        local = torch.arange(first_local, complete, device=self.slots.device).expand(layers, kv_heads, -1)
        return torch.cat([torch.stack(best), local], dim=2)

    def keys(self, layer: int, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """The keys of the complete chunks from position `start` to `stop`, few at a time: the position of the first,
        and [kv_heads, chunks, chunk, head_dim] on the device of the layer's pool.
        """
        pool = self.pools.keys[layer]
        for first in range(start, stop, READ_TOGETHER * self.chunk):
            ranges = sliced(self.held.ranges, first, min(stop, first + READ_TOGETHER * self.chunk))
            pieces = [pool[:, own[0] : own[1]] for own in ranges]
            keys = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)  # mostly one, which is not copied
            yield first, keys.unflatten(1, (-1, self.chunk))

    # -- the copies ------------------------------------------------------------------------------------------------

    def _changes(self, base: int, kept: int, places: Tensor, chunks: Tensor) -> Changes:
        """Keep `kept` tokens but put `chunks` [replaced] at `places` [replaced, (layer, kv_head, place)]."""
        layers, kv_heads, _ = places.unbind(1)
        offsets = torch.arange(self.chunk, device=self.slots.device)
        slots = self.slots[chunks[:, None] * self.chunk + offsets]  # [replaced, chunk]
        keys, values = self._empty(len(places), self.chunk)
        first = 0
        for layer, count in enumerate(torch.bincount(layers, minlength=self.geometry.num_layers).tolist()):
            rows = slice(first, first + count)
            keys[rows] = self.pools.read(self.pools.keys[layer], kv_heads[rows, None], slots[rows])
            values[rows] = self.pools.read(self.pools.values[layer], kv_heads[rows, None], slots[rows])
            first = rows.stop
        # `nonzero` returns a column-major tensor, and collectives send contiguous tensors only.
        return Changes(base, kept, places.int().contiguous(), keys, values)

    def _copy(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of `tokens` [layers, kv_heads, tokens]: [layers, kv_heads, tokens, head_dim] each."""
        keys, values = self._empty(*tokens.shape)
        for layer in range(self.geometry.num_layers):
            slots = self.slots[tokens[layer]]
            keys[layer] = self.pools.read(self.pools.keys[layer], self.all_heads(), slots)
            values[layer] = self.pools.read(self.pools.values[layer], self.all_heads(), slots)
        return keys, values

    def all_heads(self) -> Tensor:
        return torch.arange(self.geometry.num_kv_heads, device=self.slots.device)[:, None]

    def _empty(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Empty tensors for keys and for values, [*shape, head_dim] each."""
        size = (2, *shape, self.geometry.head_dim)
        keys, values = torch.empty(size, dtype=self.geometry.dtype, device=self.geometry.device)
        return keys, values


class LayerChunks:
    """What a selector sees of one layer; see `Chunks`."""

    def __init__(self, cutter: SnapshotCutter, layer: int, count: int) -> None:
        self.cutter, self.layer, self.count = cutter, layer, count
        self.held, self.kv_heads = cutter.held, cutter.geometry.num_kv_heads
        kept = self.held.queries
        # Queries from `position` on may be those of drafts that were rejected.
        usable = max(1, cutter.position - kept.positions.start)
        wanted = cutter.selector.num_queries or 1
        self.queries = kept.of(layer)[:, :usable][:, -wanted:]

    def first_query(self) -> int:
        kept = self.held.queries.positions
        return max(min(self.cutter.position, kept.stop) - self.queries.shape[1], kept.start)

    def landmarks(self, landmark: Landmark) -> Tensor:
        pool, chunk = self.cutter.pools.landmarks, self.cutter.chunk
        if pool is not None and (pool.landmark, pool.chunk) == (landmark, chunk):
            ranges = sliced(self.held.ranges, 0, self.count * chunk)
            kept = pool.read(self.layer, self.cutter.pools.keys[self.layer], ranges)
            # The copy may be asynchronous: the host changes landmarks only after the chunks are chosen.
            return kept.to(self.queries.device, non_blocking=True)
        known = self.held.landmarks_of(landmark, chunk)
        found = known[self.layer]
        covered = 0 if found is None else found.shape[1] * chunk
        if covered < self.count * chunk:
            new = [landmark(keys) for _, keys in self.cutter.keys(self.layer, covered, self.count * chunk)]
            found = torch.cat(new if found is None else [found, *new], dim=1)
            known[self.layer] = found
        assert found is not None
        return self.cutter.pools.moved(found[:, : self.count])

    def key_pieces(self) -> Iterator[tuple[int, Tensor]]:
        cutter, local_start = self.cutter, self.count * self.cutter.chunk
        for first, keys in cutter.keys(self.layer, 0, local_start):
            yield first, cutter.pools.moved(keys)
        if local_start < cutter.position:
            local = cutter.pools.read(cutter.pools.keys[self.layer], cutter.all_heads(), cutter.slots[local_start:])
            yield local_start, local[:, None]

    def mass(self) -> Tensor:
        held, cutter = self.held, self.cutter
        assert held.mass, "the sequence was opened for such a selector, and its attention counted from the beginning"
        counted = held.mass[self.layer].shape[1]
        if counted < cutter.position:
            queries, first = held.queries.of(self.layer), held.queries.positions.start
            pool, heads = cutter.pools.keys[self.layer], cutter.all_heads()[:, 0]
            keys = (cutter.pools.read(pool, head, cutter.slots) for head in heads)
            waiting = queries[:, counted - first : cutter.position - first]
            held.mass[self.layer] = with_more(held.mass[self.layer], waiting, keys)
        by_chunk: Tensor = held.mass[self.layer][:, : self.count * cutter.chunk].unflatten(1, (-1, cutter.chunk))
        return by_chunk.sum(-1)
