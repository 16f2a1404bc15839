"""Passes of constant shape, which can be captured as CUDA graphs. A shape is a number of sequences and a number of
tokens per sequence.

The tensors of such a pass keep their addresses from one pass to the next. Whatever differs between passes is copied
into one of them, `inputs`; it changes the values that the device computes with, but not its operations.
"""

from itertools import chain
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_core.attention import Ranged
from triforce_core.attention.ranged import WORD, Join, WorkItems, attend, cut, joined_with_own, num_splits, seen_of
from triforce_core.kv.base import Batch, KVCache, joined
from triforce_core.kv.full import FullKV
from triforce_core.kv.text_slots import MOST_RANGES
from triforce_core.transfer import staged


class PassShape(NamedTuple):
    """The room of a pass. Sequences with fewer tokens are padded, and missing sequences are all padding."""

    sequences: int
    queries: int  # tokens per sequence

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries


class ShapedBatch:
    """A pass of one shape. The model's attention takes it for a batch and its cache.

    Token i of sequence s is at s * queries + i. Padding follows a sequence's own tokens, so that they do not see it. A
    padding token has id 0 and position 0, and its KV is written to the dump slot.
    """

    LEAST_SPLITS = 1  # each sequence has room for at least so many ranges of visible slots

    def __init__(self, kv: KVCache, shape: PassShape, longest: int, ranged: Ranged, workers: int) -> None:
        """`longest`: most slots of earlier KV that a sequence's tokens may see. `workers`: see `num_splits`."""
        self.cache = self
        self.kv, self.shape, self.longest, self.ranged = kv, shape, longest, ranged
        self.join: Join = joined_with_own
        geometry = kv.geometry
        splits = num_splits(workers, shape.sequences, geometry.num_kv_heads, longest)
        self.splits = max(self.LEAST_SPLITS, splits)
        items = shape.sequences * self.splits
        self.words = ceil(shape.queries / WORD)
        wide = [shape.tokens] * 4 + [self.words * shape.tokens]
        self.inputs = torch.zeros(sum(wide) + 2 * items + 1, dtype=torch.int32, device=geometry.device)
        self.narrow, self.starts, self.lengths = self.inputs.split([sum(wide), items + 1, items])
        self.wide = self.narrow.long()
        self.token_ids, self.positions, self.slots, self.sampled, seen = self.wide.split(wide)
        self.seen = seen.unflatten(0, (-1, self.words))
        self.items: WorkItems | None = None  # made in the first pass, which shows how many query heads there are
        self.load(Batch(kv))

    # -- host side -----------------------------------------------------------------------------------------------------

    def has_room(self, batch: Batch) -> bool:
        """Whether the batch fits this shape; each sequence may also have at most `splits` ranges of visible slots."""
        if len(batch.rows) > self.shape.sequences:
            return False
        seen = [joined([], row.placed.visible) for row in batch.rows]
        return (
            max(row.placed.count for row in batch.rows) <= self.shape.queries
            and max(map(len, seen)) <= self.splits
            and max(sum(stop - start for start, stop in ranges) for ranges in seen) <= self.longest
        )

    def load(self, batch: Batch) -> None:
        """Start the one copy of all inputs of this pass to the device, without waiting. The batch must have room."""
        tokens, queries = self.shape.tokens, self.shape.queries
        token_ids, positions, slots = [0] * tokens, [0] * tokens, [self.kv.dump_slot] * tokens
        seen = seen_of(queries, (), self.words) * self.shape.sequences
        sampled: list[int] = []
        items: list[tuple[int, int]] = []
        for i, row in enumerate(batch.rows):
            placed = row.placed
            own = slice(i * queries, i * queries + placed.count)
            token_ids[own], positions[own] = placed.all_tokens, placed.all_positions
            slots[own] = chain.from_iterable(range(start, stop) for start, stop in placed.writes)
            if placed.tree.tokens:
                of_own = seen_of(len(placed.tokens), placed.tree.parents, self.words)
                seen[self.words * own.start : self.words * own.stop] = of_own
            sampled += range(own.stop - row.num_sampled, own.stop)
            items += cut(joined([], placed.visible), self.splits)
        items += [(0, 0)] * (self.shape.sequences * self.splits - len(items))
        sampled += [0] * (tokens - len(sampled))
        starts, lengths = zip(*items, strict=True)
        numbers = [*token_ids, *positions, *slots, *sampled, *seen, *starts, 0, *lengths]
        self.inputs.copy_(staged(numbers, torch.int32, self.inputs.device), non_blocking=True)

    def settle(self, batch: Batch) -> None:
        """Keep results of the pass for later passes; here nothing, because the KV is already in the pool."""

    # -- device side: no value is read back to the host ----------------------------------------------------------------

    def unpack(self) -> None:
        """Widen the 32-bit inputs to 64 bits, as the first step of a pass."""
        self.wide.copy_(self.narrow)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, batch: Batch) -> Tensor:
        """As `KVCache.attend`, with the tokens at this pass's indices, padding included."""
        pool = self.kv.keys[layer], self.kv.values[layer]
        group = query.shape[0] // keys.shape[0]
        if self.items is None:  # in the first pass, which is never the one that is captured
            numbers = torch.arange(len(self.starts), dtype=torch.int32, device=self.starts.device)
            query_starts = numbers * (group * self.shape.queries)
            self.items = WorkItems(self.starts, self.lengths, query_starts, self.longest, self.splits)
        output = attend(self.ranged, query, keys, values, pool, scale, self.items, self.seen, self.join)
        pool[0].index_copy_(1, self.slots, keys)
        pool[1].index_copy_(1, self.slots, values)
        return output


class VerifyBatch(ShapedBatch):
    """A pass of the target. Its queries are kept, because they select the chunks of the next snapshot."""

    LEAST_SPLITS = MOST_RANGES

    def __init__(
        self, kv: FullKV, shape: PassShape, longest: int, ranged: Ranged, workers: int, queries: Tensor
    ) -> None:
        """`queries` [layers, heads, at least `shape.tokens`, head_dim]: a buffer that passes of all shapes share."""
        super().__init__(kv, shape, longest, ranged, workers)
        self.full, self.queries = kv, queries[:, :, : shape.tokens]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, batch: Batch) -> Tensor:
        self.queries[layer] = query
        return super().attend(layer, query, keys, values, scale, batch)

    def settle(self, batch: Batch) -> None:
        for i, row in enumerate(batch.rows):
            held = self.full.held[row.sequence_id]
            first, tokens = i * self.shape.queries, len(row.placed.tokens)
            for layer, queries in enumerate(self.queries[:, :, first : first + tokens].clone()):
                self.full.take_queries(layer, held, queries, tokens)
