"""The target's cache: the exact KV of every token. kv/cutting.py cuts the snapshots for the retrieval tier."""

from __future__ import annotations

import torch
from torch import Tensor

from triforce_core.config import MAX_LOOKAHEAD
from triforce_core.kv.base import Batch, Forward, Held, KVCache, Placement
from triforce_core.kv.cutting import FullHeld, SnapshotCutter
from triforce_core.kv.ranges import Range, size_of, sliced
from triforce_core.kv.selectors import Selector
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.messages import SequenceSpec, Span

RECENT_QUERIES = 8  # last tokens of a pass whose queries are kept for selection; more if more are sampled
MOST_QUERIES = (
    2 * MAX_LOOKAHEAD + 2
)  # tokens of the longest block; more are sampled where a prompt's logprobs are asked

MOST_RANGES = 4  # of a sequence: attention runs over each of them, and captured passes have room for so many
FIRST_GROWTH = 256  # tokens by which a sequence grows first; each further growth doubles them
LEAST_GROWTH = 64  # tokens of a new range in a pool that is nearly full
LIKELY_GROWTH = 4096  # most tokens behind a sequence that others leave free for its growth, while they have a choice


class FullKV(KVCache):
    """Each sequence owns slots for the tokens that it has, and for some more. `grow` adds slots."""

    held: dict[int, FullHeld]  # type: ignore[assignment]

    def new_held(self, spec: SequenceSpec, ranges: list[Range]) -> FullHeld:
        layers = self.geometry.num_layers
        return FullHeld(
            spec, ranges=ranges, next_growth=FIRST_GROWTH, queries=[None] * layers, landmarks=[None] * layers
        )

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

    def hemmed_in(self, sequence_id: int) -> bool:
        """Whether a sequence can grow in place only, because it has as many ranges as it may."""
        return len(self.held[sequence_id].ranges) == MOST_RANGES

    def place(self, sequence_id: int, held: Held, keep: int, end: int, num_sampled: int) -> Placement:
        assert isinstance(held, FullHeld)
        assert end <= self.room(held), "a sequence grows before it is stated further"
        held.cached = end
        held.landmarked = min(held.landmarked, keep)
        if keep < end:
            num_queries = min(max(RECENT_QUERIES, num_sampled), MOST_QUERIES)
            held.query_positions = range(max(keep, end - num_queries), end)
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
        """Hold KV up to the end of `span`; draw missing KV from a normal distribution.

        Benchmarks use it for passes over a long context, whose times do not depend on the values. The sequence must
        already be open, or `span` must start at 0.
        """
        placed = self._align(Forward(span, num_sampled=0))
        assert isinstance(placed, Placement)
        held = self.held[span.sequence_id]
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            for start, stop in placed.writes:
                # Filling one head at a time is five times as fast on a CPU, because its slots are contiguous.
                for head in (*keys[:, start:stop], *values[:, start:stop]):
                    head.normal_()
            shape = len(keys), len(held.query_positions), keys.shape[-1]  # queries are always on the device
            held.queries[layer] = torch.empty(shape, dtype=keys.dtype, device=self.geometry.device).normal_()

    @torch.inference_mode()
    def cut(
        self, sequence_id: int, position: int, chunks: ChunkSettings, selector: Selector, base: int = 0
    ) -> Snapshot:
        """A sparse copy of the sequence's KV below `position`, which must be settled and held. It has the first chunk,
        the recent window, and the chunks that the last query attends to most, chosen per layer and KV head.

        It states changes to the snapshot of version `base` if that is the latest one or the base of the latest, has
        chunks of the same size and covers at most as much text; otherwise it is whole, with its chunks in the text's
        order.
        """
        return SnapshotCutter(self, self.held[sequence_id], position, chunks, selector).cut(sequence_id, base)

    def read(self, pool: Tensor, kv_heads: Tensor, slots: Tensor) -> Tensor:
        """A copy of keys or values of a layer, [*shape, head_dim], on the pool's device, which may be the host.

        `kv_heads` and `slots` broadcast to `shape`.
        """
        return pool[kv_heads.to(pool.device), slots.to(pool.device)]


def wish(spec: SequenceSpec, tokens: int) -> int:
    """How many slots a sequence that owns slots for `tokens` tokens wishes for behind them."""
    return min(LIKELY_GROWTH, spec.max_length - tokens)
