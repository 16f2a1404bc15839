"""Caches in which every sequence owns the same number of slots, and passes over them that can be captured.

Such a pass has a shape: a number of sequences, and of tokens of each. Its tensors stay where they are from one pass to
the next; what differs is copied into one of them, and nothing that the device does depends on it but through values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from triforce_core.attention import Kernel, Ranged
from triforce_core.attention.ranged import WorkItems, attend, cut, num_splits
from triforce_core.kv.base import Batch, KVCache, KVGeometry, joined
from triforce_core.kv.ranges import RangeAllocator
from triforce_core.messages import SequenceSpec
from triforce_core.transfer import staged


class FixedKV(KVCache):
    """Memory and attention cost are bounded by `slots_each` a sequence, whatever its length."""

    def __init__(self, geometry: KVGeometry, max_sequences: int, slots_each: int, kernel: Kernel) -> None:
        owned = max_sequences * slots_each
        super().__init__(geometry, owned + 1, kernel)
        self.allocator = RangeAllocator(owned)
        self.slots_each = slots_each
        self.dump_slot = owned  # written by what only fills a pass; nobody reads it

    def slots_for(self, spec: SequenceSpec) -> int:
        return self.slots_each


class PassShape(NamedTuple):
    """How much a pass has room for; sequences with fewer tokens are filled up, those that are not there are empty."""

    sequences: int
    queries: int  # tokens of each

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries

    def has_room(self, batch: Batch) -> bool:
        longest = max(len(row.placed.tokens) for row in batch.rows)
        return len(batch.rows) <= self.sequences and longest <= self.queries


class FixedBatch:
    """A pass of one shape. It stands for a batch and its cache when it travels through the model as the keyword `kv`.

    Token i of sequence s is at s * queries + i. What fills up comes after a sequence's own tokens, so none of these
    sees it; it is token 0 at position 0, sees itself alone where its sequence is empty, and goes to the dump slot.
    """

    def __init__(self, kv: FixedKV, shape: PassShape, ranged: Ranged, workers: int) -> None:
        self.cache = self
        self.kv, self.shape, self.ranged = kv, shape, ranged
        geometry, longest = kv.geometry, kv.slots_each
        self.splits = num_splits(workers, shape.sequences, geometry.num_kv_heads, longest)
        items = shape.sequences * self.splits
        self.inputs = torch.zeros(4 * shape.tokens + 2 * items + 1, dtype=torch.int32, device=geometry.device)
        self.narrow, self.starts, self.lengths = self.inputs.split([4 * shape.tokens, items + 1, items])
        self.wide = self.narrow.long()
        self.token_ids, self.positions, self.slots, self.sampled = self.wide.split(shape.tokens)
        self.numbers = torch.arange(items + 1, dtype=torch.int32, device=geometry.device)
        self.load(Batch(kv))

    # -- host side -----------------------------------------------------------------------------------------------------

    def load(self, batch: Batch) -> None:
        """Have the device copy what this pass is about, all of it at once, and do not wait; there must be room for it.

        A sequence's slots are one range: the pool is handed out in portions of one size, so that it never fragments.
        """
        tokens, queries = self.shape.tokens, self.shape.queries
        token_ids, positions, slots = [0] * tokens, [0] * tokens, [self.kv.dump_slot] * tokens
        sampled: list[int] = []
        items: list[tuple[int, int]] = []
        for i, row in enumerate(batch.rows):
            placed, count = row.placed, len(row.placed.tokens)
            [(start, stop)] = joined(placed.visible, placed.writes)
            own = slice(i * queries, i * queries + count)
            token_ids[own], positions[own], slots[own] = placed.tokens, placed.positions, range(stop - count, stop)
            sampled += range(own.stop - row.num_sampled, own.stop)
            items += cut(start, stop - count - start, self.splits)
        items += [(0, 0)] * (self.shape.sequences * self.splits - len(items))
        sampled += [0] * (tokens - len(sampled))
        starts, lengths = zip(*items, strict=True)
        numbers = [*token_ids, *positions, *slots, *sampled, *starts, 0, *lengths]
        self.inputs.copy_(staged(numbers, torch.int32, self.inputs.device), non_blocking=True)

    # -- device side: no lengths, no synchronisation -------------------------------------------------------------------

    def unpack(self) -> None:
        """A pass begins with it: what was copied as 32 bits is wanted as 64."""
        self.wide.copy_(self.narrow)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, batch: Batch) -> Tensor:
        """As `KVCache.attend`, with tokens where this pass has them."""
        pool = self.kv.keys[layer], self.kv.values[layer]
        group = query.shape[0] // keys.shape[0]
        items = WorkItems(
            self.starts,
            self.lengths,
            self.numbers * (group * self.shape.queries),
            self.kv.slots_each,
            self.splits,
        )
        output = attend(self.ranged, query, keys, values, pool, scale, items)
        pool[0].index_copy_(1, self.slots, keys)
        pool[1].index_copy_(1, self.slots, values)
        return output
