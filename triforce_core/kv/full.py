"""The target's cache: the exact KV of every token. kv/cutting.py cuts the snapshots for the retrieval tier."""

from __future__ import annotations

import torch
from torch import Tensor

from triforce_core.kv.base import Batch, Forward, Held, KVCache, Placement
from triforce_core.kv.cutting import SnapshotCutter
from triforce_core.kv.full_held import FullHeld
from triforce_core.kv.mass import with_more
from triforce_core.kv.ranges import Range, size_of, sliced
from triforce_core.kv.selectors import SELECTORS, Selector
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.messages import SequenceSpec, Span

MOST_RANGES = 4  # of a sequence: attention runs over each of them, and captured passes have room for so many
FIRST_GROWTH = 256  # tokens by which a sequence grows first; each further growth doubles them
LEAST_GROWTH = 64  # tokens of a new range in a pool that is nearly full
LIKELY_GROWTH = 4096  # most tokens behind a sequence that others leave free for its growth, while they have a choice


class FullKV(KVCache):
    """Each sequence owns slots for the tokens that it has, and for some more. `grow` adds slots."""

    held: dict[int, FullHeld]  # type: ignore[assignment]

    def new_held(self, spec: SequenceSpec, ranges: list[Range]) -> FullHeld:
        layers, num_queries = self.geometry.num_layers, SELECTORS[spec.selector]().num_queries
        held = FullHeld(spec, ranges=ranges, next_growth=FIRST_GROWTH, queries=[None] * layers, num_queries=num_queries)
        if num_queries is None:
            nothing = torch.zeros(self.geometry.num_kv_heads, 0, device=self.geometry.device)
            held.mass = [nothing] * layers
        return held

    def slots_for(self, spec: SequenceSpec) -> int:
        return spec.max_length

    def can_open(self, spec: SequenceSpec, tokens: int) -> bool:
        return self.allocator.plan(tokens, MOST_RANGES, wish(spec, tokens)) is not None

    def open(self, sequence_id: int, spec: SequenceSpec, tokens: int | None = None) -> FullHeld | None:
        """Allocate slots for `tokens` tokens of a new sequence, by default for its greatest length; None when the pool
        has no room.
        """
        tokens = self.slots_for(spec) if tokens is None else tokens
        ranges = self.allocator.allocate(tokens, MOST_RANGES, wish(spec, tokens))
        if ranges is None:
            return None
        held = self.held[sequence_id] = self.new_held(spec, ranges)
        return held

    def room(self, held: Held) -> int:
        return size_of(held.ranges)

    def grow(self, sequence_id: int, tokens: int) -> bool:
        """Make sure that the sequence owns slots for `tokens` tokens; False when the pool has no room for them.

        It grows by more than it lacks, if it can: by twice as much as the last time, in place or into a new range. No
        new range is small, because a sequence may have few.
        """
        held = self.held[sequence_id]
        owned = size_of(held.ranges)
        least, rest = tokens - owned, held.spec.max_length - owned
        if least <= 0:
            return True
        if extended := self.allocator.extend(held.ranges[-1], least, max(least, min(held.next_growth, rest))):
            held.ranges[-1] = extended
            held.next_growth *= 2
            return True
        if self.hemmed_in(sequence_id):
            return False
        for growth in (held.next_growth, FIRST_GROWTH, LEAST_GROWTH):
            size = max(least, min(growth, rest))
            if more := self.allocator.allocate(size, 1, wish(held.spec, owned + size)):
                self.allocator.wishes.pop(held.ranges[-1][1], None)  # only the last range grows
                held.ranges += more
                held.next_growth *= 2
                return True
        return False

    def keys_after(self, tokens: int) -> int:
        return tokens

    def hemmed_in(self, sequence_id: int) -> bool:
        """Whether a sequence can grow in place only, because it has as many ranges as it may."""
        return len(self.held[sequence_id].ranges) == MOST_RANGES

    def place(self, sequence_id: int, held: Held, keep: int, end: int, num_sampled: int) -> Placement:
        assert isinstance(held, FullHeld)
        assert end <= self.room(held), "a sequence grows before it is stated further"
        held.cached = end
        held.roll_back(keep)
        if keep < end:
            held.expect_queries(keep, end, num_sampled)
        return Placement(
            tokens=held.tokens[keep:end],
            positions=range(keep, end),
            writes=sliced(held.ranges, keep, end),
            visible=sliced(held.ranges, 0, keep),
        )

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, batch: Batch) -> Tensor:
        output = super().attend(layer, query, keys, values, scale, batch)
        for row in batch.rows:
            self.take_queries(layer, self.held[row.sequence_id], query[:, row.first : row.stop])
        return output

    def take_queries(self, layer: int, held: FullHeld, queries: Tensor) -> None:
        """Keep queries of a pass, and count the attention of those that its place decided to count. `queries` [heads,
        tokens of the pass, head_dim]. Their KV must be in the cache.
        """
        if not held.simple:
            before = held.queries[layer]
            if before is not None and held.num_carried:
                queries = torch.cat([before[:, : held.num_carried], queries], dim=1)
            if held.mass:
                self._count(layer, held, queries)
        held.queries[layer] = queries[:, queries.shape[1] - len(held.query_positions) :].clone()

    def _count(self, layer: int, held: FullHeld, queries: Tensor) -> None:
        """Add the attention of the settled ones among these queries, the last ones of the text."""
        counted = held.mass[layer].shape[1]
        if counted == held.count_to:
            return
        first = held.query_positions.stop - queries.shape[1]
        pool_keys, _ = self.on_device(layer)
        ranges = sliced(held.ranges, 0, held.count_to)
        keys = (torch.cat([head[start:stop] for start, stop in ranges]) for head in pool_keys)
        settled = queries[:, counted - first : held.count_to - first]
        held.mass[layer] = with_more(held.mass[layer], settled, keys)

    @torch.inference_mode()
    def fill(self, span: Span, group: int = 1) -> None:
        """Hold KV up to the end of `span`; draw missing KV from a normal distribution.

        Benchmarks use it for passes over a long context, whose times do not depend on the values. All heads and layers
        get the same values, because a CPU takes minutes to draw those of a long context. The sequence must already be
        open, or `span` must start at 0. `group`: query heads of each KV head.
        """
        placed = self._align(Forward(span, num_sampled=0))
        assert isinstance(placed, Placement)
        held, geometry = self.held[span.sequence_id], self.geometry
        longest = max((stop - start for start, stop in placed.writes), default=0)
        drawn: dict[torch.device, Tensor] = {}  # by the device of a layer's pool
        for layer, pools in enumerate(zip(self.keys, self.values, strict=True)):
            place = pools[0].device
            if place not in drawn:
                drawn[place] = torch.empty(2, longest, geometry.head_dim, dtype=geometry.dtype, device=place).normal_()
            for start, stop in placed.writes:
                for pool, values in zip(pools, drawn[place], strict=True):
                    pool[:, start:stop] = values[: stop - start]
            shape = group * geometry.num_kv_heads, len(held.query_positions), geometry.head_dim
            held.queries[layer] = torch.empty(shape, dtype=geometry.dtype, device=geometry.device).normal_()
            if held.mass:
                held.mass[layer] = torch.ones(geometry.num_kv_heads, held.count_to, device=geometry.device)

    @torch.inference_mode()
    def cut(
        self, sequence_id: int, position: int, chunks: ChunkSettings, selector: Selector, base: int = 0
    ) -> Snapshot:
        """A sparse copy of the sequence's KV below `position`, which must be settled and held. It has the first chunk,
        the recent window, and the chunks that the selector ranks highest, chosen per layer and KV head.

        It states changes to the snapshot of version `base` if that is the latest one or the base of the latest, has
        chunks of the same size and covers at most as much text; otherwise it is whole, with its chunks in the text's
        order.
        """
        return SnapshotCutter(self, self.held[sequence_id], position, chunks, selector).cut(sequence_id, base)

    def read(self, pool: Tensor, kv_heads: Tensor, slots: Tensor) -> Tensor:
        """A copy of keys or values of a layer, [*shape, head_dim], on the device that computes.

        `kv_heads` and `slots` broadcast to `shape`.
        """
        return pool[kv_heads, slots]

    def moved(self, tensor: Tensor) -> Tensor:
        """A part of a pool, or what was computed of it, on the device that computes."""
        return tensor


def wish(spec: SequenceSpec, tokens: int) -> int:
    """How many slots a sequence that owns slots for `tokens` tokens wishes for behind them."""
    return min(LIKELY_GROWTH, spec.max_length - tokens)
