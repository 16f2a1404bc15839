"""Passes that can be captured. Such a pass has a shape: a number of sequences, and of tokens of each.

Its tensors stay where they are from one pass to the next; what differs is copied into one of them, and nothing that the
device does depends on it but through values.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from triforce_core.attention import Ranged
from triforce_core.attention.ranged import Join, WorkItems, attend, cut, joined_with_own, num_splits
from triforce_core.kv.base import Batch, KVCache, joined
from triforce_core.kv.full import FullKV
from triforce_core.transfer import staged


class PassShape(NamedTuple):
    """How much a pass has room for; sequences with fewer tokens are filled up, those that are not there are empty."""

    sequences: int
    queries: int  # tokens of each

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries


class ShapedBatch:
    """A pass of one shape. It stands for a batch and its cache when it travels through the model as the keyword `kv`.

    Token i of sequence s is at s * queries + i. What fills up comes after a sequence's own tokens, so none of these
    sees it; it is token 0 at position 0, sees itself alone where its sequence is empty, and goes to the dump slot.
    """

    def __init__(self, kv: KVCache, shape: PassShape, longest: int, ranged: Ranged, workers: int) -> None:
        """`longest`: the most slots that a sequence's tokens see before them. `workers`: see `num_splits`."""
        self.cache = self
        self.kv, self.shape, self.longest, self.ranged = kv, shape, longest, ranged
        self.join: Join = joined_with_own
        geometry = kv.geometry
        self.splits = num_splits(workers, shape.sequences, geometry.num_kv_heads, longest)
        items = shape.sequences * self.splits
        self.inputs = torch.zeros(4 * shape.tokens + 2 * items + 1, dtype=torch.int32, device=geometry.device)
        self.narrow, self.starts, self.lengths = self.inputs.split([4 * shape.tokens, items + 1, items])
        self.wide = self.narrow.long()
        self.token_ids, self.positions, self.slots, self.sampled = self.wide.split(shape.tokens)
        self.numbers = torch.arange(items + 1, dtype=torch.int32, device=geometry.device)
        self.load(Batch(kv))

    # -- host side -----------------------------------------------------------------------------------------------------

    def has_room(self, batch: Batch) -> bool:
        """Also for every range of slots that a sequence lies in: it is read in as many pieces at least."""
        if len(batch.rows) > self.shape.sequences:
            return False
        seen = [joined([], row.placed.visible) for row in batch.rows]
        return (
            max(len(row.placed.tokens) for row in batch.rows) <= self.shape.queries
            and max(map(len, seen)) <= self.splits
            and max(sum(stop - start for start, stop in ranges) for ranges in seen) <= self.longest
        )

    def load(self, batch: Batch) -> None:
        """Have the device copy what this pass is about, all of it at once, and do not wait; there must be room."""
        tokens, queries = self.shape.tokens, self.shape.queries
        token_ids, positions, slots = [0] * tokens, [0] * tokens, [self.kv.dump_slot] * tokens
        sampled: list[int] = []
        items: list[tuple[int, int]] = []
        for i, row in enumerate(batch.rows):
            placed = row.placed
            own = slice(i * queries, i * queries + len(placed.tokens))
            token_ids[own], positions[own] = placed.tokens, placed.positions
            slots[own] = chain.from_iterable(range(start, stop) for start, stop in placed.writes)
            sampled += range(own.stop - row.num_sampled, own.stop)
            items += cut(joined([], placed.visible), self.splits)
        items += [(0, 0)] * (self.shape.sequences * self.splits - len(items))
        sampled += [0] * (tokens - len(sampled))
        starts, lengths = zip(*items, strict=True)
        numbers = [*token_ids, *positions, *slots, *sampled, *starts, 0, *lengths]
        self.inputs.copy_(staged(numbers, torch.int32, self.inputs.device), non_blocking=True)

    def settle(self, batch: Batch) -> None:
        """Keep what the pass that has just run leaves for later. Nothing but KV, which is in the pool."""

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
            self.longest,
            self.splits,
        )
        output = attend(self.ranged, query, keys, values, pool, scale, items, self.join)
        pool[0].index_copy_(1, self.slots, keys)
        pool[1].index_copy_(1, self.slots, values)
        return output


class VerifyBatch(ShapedBatch):
    """One of the target's, whose queries are kept: the next snapshot's chunks are chosen by them."""

    def __init__(
        self, kv: FullKV, shape: PassShape, longest: int, ranged: Ranged, workers: int, queries: Tensor
    ) -> None:
        """`queries` [layers, heads, at least `shape.tokens`, head_dim]: written by every pass that shares it."""
        super().__init__(kv, shape, longest, ranged, workers)
        self.full, self.queries = kv, queries[:, :, : shape.tokens]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, batch: Batch) -> Tensor:
        self.queries[layer] = query
        return super().attend(layer, query, keys, values, scale, batch)

    def settle(self, batch: Batch) -> None:
        for i, row in enumerate(batch.rows):
            held = self.full.held[row.sequence_id]
            stop = i * self.shape.queries + len(row.placed.tokens)
            held.queries = [*self.queries[:, :, stop - len(held.query_positions) : stop].clone()]
