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

from triforce_core.attention import Ranged, Scoring
from triforce_core.attention.ranged import WORD, Join, WorkItems, attend, cut, joined_with_own, num_splits, seen_of
from triforce_core.kv.base import Batch, KVCache, Row, joined
from triforce_core.kv.full import FullKV
from triforce_core.kv.ranges import Range, size_of, sliced
from triforce_core.kv.text_slots import MOST_RANGES
from triforce_core.transfer import staged


class PassShape(NamedTuple):
    """The room of a pass. Sequences with fewer tokens are padded, and missing sequences are all padding."""

    sequences: int
    queries: int  # tokens per sequence

    @property
    def tokens(self) -> int:
        return self.sequences * self.queries


class Room:
    """Room in the inputs of a pass for the slots that its readers see, in `splits` items each. The readers are the
    sequences, or the single tokens.
    """

    def __init__(self, readers: int, queries: int, splits: int, longest: int) -> None:
        """`queries`: tokens of a reader. `longest`: most slots that a reader may see."""
        self.readers, self.queries, self.splits, self.longest = readers, queries, splits, longest
        self.size = 2 * readers * splits

    def has_room(self, seen: list[list[Range]]) -> bool:
        return all(len(ranges) <= self.splits and size_of(ranges) <= self.longest for ranges in seen)

    def numbers(self, seen: list[list[Range]]) -> list[int]:
        """The inputs for these readers; others see nothing."""
        items = [item for ranges in seen for item in cut(ranges, self.splits)]
        items += [(0, 0)] * (self.readers * self.splits - len(items))
        starts, lengths = zip(*items, strict=True)
        return [*starts, *lengths]

    def items(self, inputs: Tensor) -> WorkItems:
        """The inputs as items."""
        starts, lengths = inputs.chunk(2)
        return WorkItems(starts, lengths, self.longest, self.splits)


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
        self.rooms = [self._room(shape.sequences, longest, workers, self.LEAST_SPLITS)]
        if kv.geometry.windows.layers:
            self.rooms.append(self._room_in_window(workers))
        self.words = ceil(shape.queries / WORD)
        wide = [shape.tokens] * 4 + [self.words * shape.tokens]
        sizes = [sum(wide), *(room.size for room in self.rooms)]
        self.inputs = torch.zeros(sum(sizes), dtype=torch.int32, device=kv.geometry.device)
        self.narrow, *self.ranges = self.inputs.split(sizes)
        self.wide = self.narrow.long()
        self.token_ids, self.positions, self.slots, self.sampled, seen = self.wide.split(wide)
        self.seen = seen.unflatten(0, (*shape, self.words))
        self.items = [room.items(inputs) for room, inputs in zip(self.rooms, self.ranges, strict=True)]
        self.load(Batch(kv))

    def _room(self, readers: int, longest: int, workers: int, least: int) -> Room:
        splits = max(least, num_splits(workers, readers, self.kv.geometry.num_kv_heads, longest))
        return Room(readers, self.shape.tokens // readers, splits, longest)

    def _room_in_window(self, workers: int) -> Room:
        """The room for layers with a window, of which a snapshot has three ranges."""
        return self._room(self.shape.sequences, self.longest, workers, 3)

    def _seen(self, row: Row) -> list[list[list[Range]]]:
        """By room, the slots that each reader of a sequence sees."""
        placed = row.placed
        seen = [placed.visible, placed.visible if placed.near is None else placed.near]
        return [[joined([], ranges)] for ranges in seen[: len(self.rooms)]]

    # -- host side -----------------------------------------------------------------------------------------------------

    def has_room(self, batch: Batch) -> bool:
        """Whether the batch fits this shape; each sequence may also have only so many ranges of visible slots."""
        if len(batch.rows) > self.shape.sequences:
            return False
        if max(row.placed.count for row in batch.rows) > self.shape.queries:
            return False
        seen = (pair for row in batch.rows for pair in zip(self.rooms, self._seen(row), strict=True))
        return all(room.has_room(ranges) for room, ranges in seen)

    def load(self, batch: Batch) -> None:
        """Start the one copy of all inputs of this pass to the device, without waiting. The batch must have room."""
        self.inputs.copy_(staged(self.numbers(batch), torch.int32, self.inputs.device), non_blocking=True)

    def numbers(self, batch: Batch) -> list[int]:
        """The inputs of a pass over this batch; first the ids of its tokens."""
        tokens, queries = self.shape.tokens, self.shape.queries
        token_ids, positions, slots = [0] * tokens, [0] * tokens, [self.kv.dump_slot] * tokens
        seen = seen_of(queries, (), self.words) * self.shape.sequences
        sampled: list[int] = []
        visible: list[list[list[Range]]] = [[] for _ in self.rooms]
        for i, row in enumerate(batch.rows):
            placed = row.placed
            own = slice(i * queries, i * queries + placed.count)
            token_ids[own], positions[own] = placed.all_tokens, placed.all_positions
            slots[own] = chain.from_iterable(range(start, stop) for start, stop in placed.writes)
            if placed.tree.tokens:
                of_own = seen_of(len(placed.tokens), placed.tree.parents, self.words)
                seen[self.words * own.start : self.words * own.stop] = of_own
            sampled += range(own.stop - row.num_sampled, own.stop)
            for of_room, of_row in zip(visible, self._seen(row), strict=True):
                of_room.extend(of_row)
        sampled += [0] * (tokens - len(sampled))
        numbers = [*token_ids, *positions, *slots, *sampled, *seen]
        for room, readers in zip(self.rooms, visible, strict=True):
            numbers += room.numbers(readers)
        return numbers

    def settle(self, batch: Batch) -> None:
        """Keep results of the pass for later passes; here nothing, because the KV is already in the pool."""

    # -- device side: no value is read back to the host ----------------------------------------------------------------

    def unpack(self) -> None:
        """Widen the 32-bit inputs to 64 bits, as the first step of a pass."""
        self.wide.copy_(self.narrow)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, batch: Batch) -> Tensor:
        """As `KVCache.attend`, with the tokens at this pass's indices, padding included."""
        pool = self.kv.keys[layer], self.kv.values[layer]
        items = self.items[layer in self.kv.geometry.windows.layers]
        output = attend(self.ranged, query, keys, values, pool, scoring, items, self.seen, self.join)
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

    def _room_in_window(self, workers: int) -> Room:
        """Each token reads for itself, because each one's window begins elsewhere."""
        longest = min(self.kv.geometry.windows.size - 1, self.longest)
        return self._room(self.shape.tokens, longest, workers, self.LEAST_SPLITS)

    def _seen(self, row: Row) -> list[list[list[Range]]]:
        whole, size, positions = joined([], row.placed.visible), self.kv.geometry.windows.size, row.placed.positions
        near = [sliced(whole, max(0, position + 1 - size), positions.start) for position in positions]
        near += [[]] * (self.shape.queries - len(near))
        return [[whole], near][: len(self.rooms)]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, batch: Batch) -> Tensor:
        self.queries[layer] = query
        return super().attend(layer, query, keys, values, scoring, batch)

    def settle(self, batch: Batch) -> None:
        for i, row in enumerate(batch.rows):
            held = self.full.held[row.sequence_id]
            first, tokens = i * self.shape.queries, len(row.placed.tokens)
            for layer, queries in enumerate(self.queries[:, :, first : first + tokens].clone()):
                self.full.take_queries(layer, held, queries, tokens)
