"""Cutting snapshots of the full cache: selects chunks for the retrieval tier and copies their KV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triforce_core.kv.full_held import FullHeld, Layout
from triforce_core.kv.landmarks import READ_TOGETHER
from triforce_core.kv.mass import with_more
from triforce_core.kv.ranges import sliced
from triforce_core.kv.selectors import Landmark, Selector, grouped
from triforce_core.kv.snapshot import Changes, ChunkSettings, Snapshot, arrange
from triforce_core.transfer import on_device

if TYPE_CHECKING:
    from triforce_core.kv.full import FullKV


class SnapshotCutter:
    """Cuts one snapshot of one sequence. Records its layout in `held`, so that the next can state changes to it."""

    def __init__(self, pools: FullKV, held: FullHeld, position: int, chunks: ChunkSettings, selector: Selector) -> None:
        """`position`: the snapshot covers the KV below it, which must be settled and held."""
        assert position <= held.cached, "a snapshot is cut of settled KV"
        self.pools, self.held, self.position, self.settings, self.selector = pools, held, position, chunks, selector
        self.geometry, self.chunk = pools.geometry, chunks.chunk
        self.whole = self.geometry.whole_layers
        device = self.geometry.device
        ranges = [torch.arange(start, stop, device=device) for start, stop in sliced(held.ranges, 0, position)]
        self.slots = torch.cat(ranges or [torch.arange(0, device=device)])  # the slot of each token, [position] int64

    def cut(self, sequence_id: int, base: int) -> Snapshot:
        """Cut the snapshot, which becomes the sequence's latest. It states changes to version `base` if that version's
        layout is known and fits; otherwise it is whole, with its chunks in the order of the text.
        """
        chosen = self.choose()
        before = self._layout_before(base)
        nothing = chosen.new_empty(self.geometry.num_layers, self.geometry.num_kv_heads, 0)
        known = nothing if before is None else before.chunks
        kept, complete = min(known.shape[-1], chosen.shape[-1]), self.position // self.chunk
        arranged, fresh = self._arranged(known[..., :kept], chosen)
        changes = None
        if before is not None:
            replaced = fresh[..., :kept]
            changes = self._changes(base, kept * self.chunk, replaced.nonzero(), arranged[..., :kept][replaced])
        offsets = torch.arange(self.chunk, device=self.slots.device)
        tokens = (arranged[..., kept:, None] * self.chunk + offsets).flatten(2)
        rest = torch.arange(complete * self.chunk, self.position, device=self.slots.device)
        slots = self.slots[torch.cat([tokens, rest.expand(*tokens.shape[:2], -1)], dim=2)]
        every = [torch.arange(count, device=self.slots.device) for count in slots.shape[:2]]
        keys, values = self.pools.read(every[0][:, None, None], every[1][:, None], slots)
        version = self._remember(Layout(arranged, self.chunk, self.position), changes)
        return Snapshot(sequence_id, version, self.position, keys, values, changes)

    def _layout_before(self, base: int) -> Layout | None:
        """The layout of version `base`; None if forgotten, of a longer text, or of chunks of another size."""
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
        """The complete chunks of the snapshot in layers without a window, [layers, kv_heads, chunks] int64, ascending:
        the first chunk, the chunks of the recent window, and those that the selector ranks highest, chosen per layer
        and KV head.
        """
        layers, kv_heads = len(self.whole), self.geometry.num_kv_heads
        local_start, num_chosen = self.settings.split(self.position)
        first_local, complete = local_start // self.chunk, self.position // self.chunk
        if num_chosen == first_local:  # all fit
            return torch.arange(complete, device=self.slots.device).expand(layers, kv_heads, -1)
        best = torch.empty(0, kv_heads, num_chosen, dtype=torch.int64, device=self.slots.device)
        if self.whole:
            scores = torch.stack([self.selector.scores(LayerChunks(self, layer, first_local)) for layer in self.whole])
            scores[:, :, 0] = torch.inf  # the attention sinks
            best = scores.topk(num_chosen, dim=-1).indices.sort(-1).values
        local = torch.arange(first_local, complete, device=self.slots.device).expand(layers, kv_heads, -1)
        return torch.cat([best, local], dim=2)

    def _arranged(self, known: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """As `arrange`, for all layers, where `chosen` is for those without a window. For the others see
        `ChunkSettings.near`.
        """
        complete, places = self.position // self.chunk, chosen.shape[-1]
        if not self.geometry.windows.layers:
            return arrange(known, chosen, complete)
        numbers, last = torch.arange(places, device=known.device), complete - 1
        near = self.settings.near(self.geometry.windows.size)
        latest = torch.where(numbers < near, last - (last - numbers) % near, numbers)
        arranged = latest.repeat(*known.shape[:2], 1)
        arranged[..., near : known.shape[-1]] = known[..., near:]
        fresh = torch.ones_like(arranged, dtype=torch.bool)
        fresh[..., : known.shape[-1]] = arranged[..., : known.shape[-1]] != known
        whole = on_device(self.whole, torch.int64, known.device)
        for every, of_whole in zip(
            (arranged, fresh), arrange(known.index_select(0, whole), chosen, complete), strict=True
        ):
            every.index_copy_(0, whole, of_whole)
        return arranged, fresh

    def keys(self, layer: int, start: int, stop: int, together: int) -> Iterator[tuple[int, Tensor]]:
        """The keys from position `start` to `stop`, at most `together` tokens at a time, in whole chunks but for the
        last: the position of the first, and [kv_heads, tokens, head_dim] on the device of the layer's pool.
        """
        pool = self.pools.keys[layer]
        for first in range(start, stop, together):
            pieces = [pool[:, a:b] for a, b in sliced(self.held.ranges, first, min(stop, first + together))]
            if any(piece.shape[1] % self.chunk for piece in pieces[:-1]):  # in pools of other chunks
                pieces = [torch.cat(pieces, dim=1)]
            position = first
            for piece in pieces:
                yield position, piece
                position += piece.shape[1]

    # -- the copies ------------------------------------------------------------------------------------------------

    def _changes(self, base: int, kept: int, places: Tensor, chunks: Tensor) -> Changes:
        """Keep `kept` tokens but put `chunks` [replaced] at `places` [replaced, (layer, kv_head, place)]."""
        layers, kv_heads, _ = places.unsqueeze(-1).unbind(1)
        offsets = torch.arange(self.chunk, device=self.slots.device)
        keys, values = self.pools.read(layers, kv_heads, self.slots[chunks[:, None] * self.chunk + offsets])
        # `nonzero` returns a column-major tensor, and collectives send contiguous tensors only.
        return Changes(base, kept, places.int().contiguous(), keys, values)


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

    def log_sums(self) -> Tensor:
        cutter, pool = self.cutter, self.cutter.pools.keys[self.layer]
        query, rows, kept = grouped(self.queries, self.kv_heads), self.queries.shape[1], self.held.queries.positions
        first = max(min(cutter.position, kept.stop) - rows, kept.start)  # the position of the first query
        # Keys elsewhere are brought few at a time, which bounds the memory that they take on the device.
        together = cutter.position if pool.device == query.device else READ_TOGETHER * cutter.chunk
        sums = [
            cutter.pools.chunk_sums(
                query, cutter.pools.moved(keys), query.shape[-1] ** -0.5, cutter.chunk, first + 1 - start, rows
            )
            for start, keys in cutter.keys(self.layer, 0, cutter.position, together)
        ]
        return sums[0] if len(sums) == 1 else torch.cat(sums, dim=-1)

    def landmarks(self, landmark: Landmark) -> Tensor:
        pool, chunk = self.cutter.pools.landmarks, self.cutter.chunk
        if pool is not None and (pool.landmark, pool.chunk) == (landmark, chunk):
            ranges = sliced(self.held.ranges, 0, self.count * chunk)
            kept = pool.read(self.layer, self.cutter.pools.keys[self.layer], ranges)
            # The copy may be asynchronous: the host changes landmarks only after the chunks are chosen.
            return kept.to(self.queries.device, non_blocking=True)
        pieces = self.cutter.keys(self.layer, 0, self.count * chunk, READ_TOGETHER * chunk)
        found = torch.cat([landmark(keys.unflatten(1, (-1, chunk))) for _, keys in pieces], dim=1)
        return self.cutter.pools.moved(found)

    def mass(self) -> Tensor:
        held, cutter = self.held, self.cutter
        assert held.mass, "the sequence was opened for such a selector, and its attention counted from the beginning"
        counted = held.mass[self.layer].shape[1]
        if counted < cutter.position:
            queries, first = held.queries.of(self.layer), held.queries.positions.start
            pieces = [keys.split(1) for _, keys in cutter.keys(self.layer, 0, cutter.position, cutter.position)]
            keys = (cutter.pools.moved(torch.cat(head, dim=1))[0] for head in zip(*pieces, strict=True))
            waiting = queries[:, counted - first : cutter.position - first]
            held.mass[self.layer] = with_more(held.mass[self.layer], waiting, keys)
        by_chunk: Tensor = held.mass[self.layer][:, : self.count * cutter.chunk].unflatten(1, (-1, cutter.chunk))
        return by_chunk.sum(-1)
