"""The target's cache: the exact KV of every token, in the slots that kv/text_slots.py gives to each text. kv/cutting.py
cuts the snapshots for the retrieval tier.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_core.attention import ChunkSums, Kernel, Scoring, torch_chunk_sums
from triforce_core.kv.base import Batch, Held, KVCache, KVGeometry, Placement, Row, joined
from triforce_core.kv.cutting import SnapshotCutter
from triforce_core.kv.folds import Reading
from triforce_core.kv.full_held import FullHeld
from triforce_core.kv.in_blocks import BlockReading, attend_in_blocks, groups_of, plan_blocks
from triforce_core.kv.kept_queries import KeptQueries
from triforce_core.kv.landmarks import LandmarkPool
from triforce_core.kv.mass import with_more
from triforce_core.kv.prefix_tree import Cursor
from triforce_core.kv.ranges import Range, paired, rounded_up, size_of, sliced
from triforce_core.kv.selectors import SELECTORS, Landmark, Selector
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.kv.text_slots import FIRST_GROWTH, MOST_RANGES, TextSlots, wish
from triforce_core.kv.windowed import attend_in_window
from triforce_core.messages import SequenceSpec

# A pass over at least this number of tokens of a sequence computes the landmarks of their chunks. After shorter passes
# the next cut computes the landmarks of several passes together, at less cost per chunk.
LEAST_FILLED = 64


class FullKV(KVCache):
    """Each sequence owns slots for the tokens that it has, and for some more. `grow` adds slots."""

    held: dict[int, FullHeld]  # type: ignore[assignment]

    def __init__(
        self,
        geometry: KVGeometry,
        pool_tokens: int,
        kernel: Kernel,
        pools: Sequence[Tensor] | None = None,
        *,
        unit: int = 1,
        shares: bool = False,
        landmark: Landmark | None = None,
        chunk_sums: ChunkSums = torch_chunk_sums,
        in_blocks: bool = False,
    ) -> None:
        """`unit`: tokens of a chunk; ranges begin and end at whole chunks, and `pool_tokens` is rounded up to them.
        `landmark`: what is kept of each chunk for selectors. `chunk_sums`: how selectors that weigh all keys do so.
        `in_blocks`: tokens attend in blocks of keys (attention/blocks.py), which makes their bits independent of the
        pass; the kernel is not used then.
        """
        super().__init__(geometry, rounded_up(pool_tokens, unit), kernel, pools)
        self.chunk_sums, self.in_blocks = chunk_sums, in_blocks
        self.shares, self.slots = shares, TextSlots(self.dump_slot, unit)
        self.allocator, self.tree = self.slots.allocator, self.slots.tree
        self.landmarks = LandmarkPool(landmark, unit, geometry, self.keys) if landmark else None

    def new_held(self, spec: SequenceSpec, ranges: list[Range]) -> FullHeld:
        # Where all layers have windows, no chunks are selected.
        num_queries = SELECTORS[spec.selector]().num_queries if self.geometry.whole_layers else 1
        queries = KeptQueries(self.geometry.num_layers)
        held = FullHeld(spec, ranges=ranges, next_growth=FIRST_GROWTH, queries=queries, num_queries=num_queries)
        if num_queries is None:
            nothing = torch.zeros(self.geometry.num_kv_heads, 0, device=self.geometry.device)
            held.mass = dict.fromkeys(self.geometry.whole_layers, nothing)
        return held

    def slots_for(self, spec: SequenceSpec) -> int:
        return spec.max_length

    @property
    def used_tokens(self) -> int:
        """How many slots live sequences own or share."""
        return super().used_tokens - self.kept_tokens

    @property
    def kept_tokens(self) -> int:
        return self.tree.idle_tokens

    @property
    def dropped_tokens(self) -> int:
        return self.tree.dropped_tokens

    # -- opening: what the pool holds of the text is matched first -----------------------------------------------------

    def look(self, spec: SequenceSpec, text: list[int]) -> Cursor | None:
        """A cursor over the part of this text that may be matched; None if nothing may.

        The last tokens are never matched, because their queries choose the first snapshot's chunks and must be
        computed. So the snapshot is the one that an empty pool would give. A selector that counts attention from the
        beginning needs all queries, and the logprobs of a prompt need all logits.
        """
        num_queries = SELECTORS[spec.selector]().num_queries
        if not self.shares or num_queries is None or spec.prompt_logprobs is not None:
            return None
        most = (len(text) - 1 - num_queries) // self.tree.unit * self.tree.unit
        return Cursor(spec.cache_salt, text, most) if most > 0 else None

    def matched(self, cursor: Cursor) -> int:
        """How many tokens of this text the pool holds."""
        return self.tree.advance(cursor)

    def can_open(self, spec: SequenceSpec, tokens: int, cursor: Cursor | None = None) -> bool:
        return self.slots.beginning(spec, tokens, cursor) is not None

    def open(
        self, sequence_id: int, spec: SequenceSpec, tokens: int | None = None, text: Sequence[int] = ()
    ) -> FullHeld | None:
        """Make room for `tokens` tokens of a new sequence, by default for its greatest length; None when the pool has
        none. `text`: what will be stated first. The KV of its beginning may be there; `cached` says how much.
        """
        tokens, known = self.slots_for(spec) if tokens is None else tokens, list(text)
        cursor = self.look(spec, known)
        beginning = self.slots.beginning(spec, tokens, cursor)
        if beginning is None:
            return None
        matched, shared = beginning
        # The matched nodes are in use from here on, so that no room is made by dropping them.
        node = self.tree.enter(spec.cache_salt, cursor.node if cursor else None, matched)
        there = self.tree.ranges(node, matched)
        most_ranges = MOST_RANGES - len(joined([], sliced(there, 0, shared)))
        own = self.slots.allocate(tokens - shared, most_ranges, wish(spec, tokens))
        if shared < matched:
            self._copy(sliced(there, shared, matched), sliced(own, 0, matched - shared))
            upper = self.tree.enter(spec.cache_salt, node, shared)
            self.tree.leave(node)
            node = upper
        self._clear(sliced(own, matched - shared, size_of(own)))
        held = self.held[sequence_id] = self.new_held(spec, joined(sliced(there, 0, shared), own))
        held.tokens, held.cached = known[:matched], matched
        # 0: nothing is given to the tree while the prompt is read. If logprobs of the prompt are asked for, each chunk
        # starts with the last token of the previous chunk. The slot of this token is written twice, which is forbidden
        # for slots that were given to the tree.
        held.told = len(known) if spec.prompt_logprobs is None else 0
        held.node, held.given = node, [(0, shared)] if shared else []
        return held

    @torch.inference_mode()
    def _copy(self, sources: list[Range], targets: list[Range]) -> None:
        """Copy the KV of the slots `sources` into the slots `targets`; both have the same number of slots."""
        if self.landmarks:
            self.landmarks.forget(targets)
        for pool in self.pools:
            for (first, last), (start, stop) in paired(sources, targets):
                pool[..., start:stop, :] = pool[..., first:last, :]

    def release(self, sequence_id: int) -> None:
        """Forget a sequence. Where texts are shared, the KV of its settled text is kept for others."""
        held = self.held.pop(sequence_id, None)
        if held is None:
            return
        if self.shares:
            self.slots.give(held, min(held.cached, len(held.tokens) - held.drafted))
        self.slots.free(held)

    def spare(self, count: int) -> list[Range] | None:
        self.slots.make_room(count)
        return super().spare(count)

    def grow(self, sequence_id: int, tokens: int) -> bool:
        """Make sure that the sequence owns slots for `tokens` tokens; False when the pool has no room for them."""
        held = self.held[sequence_id]
        owned = size_of(held.ranges)
        grown = self.slots.grow(held, tokens)
        self._clear(sliced(held.ranges, owned, size_of(held.ranges)))
        return grown

    @torch.inference_mode()
    def _clear(self, ranges: list[Range]) -> None:
        """Forget what other texts have left in these slots. Blocks are read to their end, and though what is behind a
        text counts for nothing, it must be finite for that.
        """
        for pool in self.pools if self.in_blocks else ():
            for start, stop in ranges:
                pool[..., start:stop, :] = 0

    def hemmed_in(self, sequence_id: int) -> bool:
        """Whether a sequence can grow in place only, because it has `MOST_RANGES` ranges."""
        return len(self.held[sequence_id].ranges) == MOST_RANGES

    def room(self, held: Held) -> int:
        return min(size_of(held.ranges), held.spec.max_length)

    def keys_after(self, tokens: int) -> int:
        return tokens

    def place(self, sequence_id: int, held: Held, keep: int, end: int, num_sampled: int) -> Placement:
        assert isinstance(held, FullHeld)
        assert end <= self.room(held), "a sequence grows before it is stated further"
        assert not held.given or held.given[-1][1] <= keep, "KV that others may use is not written again"
        held.cached = end
        held.roll_back(keep)
        if keep < end:
            held.expect_queries(keep, end, num_sampled)
        if self.shares and held.told:  # all but the last token of the prompt, which may be asked for again
            self.slots.give(held, min(end - held.drafted, held.told - 1))
        writes = sliced(held.ranges, keep, end)
        if self.landmarks:
            self.landmarks.forget(writes)
        return Placement(
            tokens=held.tokens[keep:end],
            positions=range(keep, end),
            writes=writes,
            visible=sliced(held.ranges, 0, keep),
        )

    def _plan(self, rows: list[Row]) -> Reading | BlockReading | None:
        return self._plan_blocks(rows) if self.in_blocks else super()._plan(rows)

    def _plan_blocks(self, rows: list[Row], window: int | None = None) -> BlockReading:
        texts = [(row.first, row.placed.positions, self._text_of(row)) for row in rows]
        return plan_blocks([group for text in texts for group in groups_of(*text, window)])

    def _text_of(self, row: Row) -> list[Range]:
        """The slots of a row's text, with those behind its tokens if the sequence owns them: they hold finite numbers.
        An audit puts tokens elsewhere.
        """
        text, owned = joined(row.placed.visible, row.placed.writes), self.held[row.sequence_id].ranges
        return owned if sliced(owned, 0, size_of(text)) == text else text

    def _attended(
        self,
        layer: int,
        query: Tensor,
        new: tuple[Tensor, Tensor],
        pool: tuple[Tensor, Tensor],
        scoring: Scoring,
        batch: Batch,
    ) -> Tensor:
        window = self.geometry.windows.of(layer)
        if window is None:
            if not self.in_blocks:
                return super()._attended(layer, query, new, pool, scoring, batch)
            batch.reading = batch.reading or self._plan(batch.rows)
            assert isinstance(batch.reading, BlockReading)
            return attend_in_blocks(query, *pool, scoring, batch.reading)
        if self.in_blocks:
            batch.in_window = batch.in_window or self._plan_blocks(batch.rows, window)
            return attend_in_blocks(query, *pool, scoring, batch.in_window)
        texts = [(row.first, row.placed.positions, joined(row.placed.visible, row.placed.writes)) for row in batch.rows]
        return attend_in_window(self.kernel, query, pool, scoring, texts, window)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, batch: Batch) -> Tensor:
        output = super().attend(layer, query, keys, values, scoring, batch)
        for row in batch.rows:
            self.take_queries(layer, self.held[row.sequence_id], query[:, row.first : row.stop], query.shape[1])
            if self.landmarks and len(row.placed.tokens) >= LEAST_FILLED:
                positions, chunk = row.placed.positions, self.landmarks.chunk
                start, stop = (position // chunk * chunk for position in (positions.start, positions.stop))
                pool_keys, _ = self.on_device(layer)
                self.landmarks.fill(layer, pool_keys, sliced(self.held[row.sequence_id].ranges, start, stop))
        return output

    def take_queries(self, layer: int, held: FullHeld, queries: Tensor, together: int) -> None:
        """Keep the queries at the positions that `place` chose. If the selector needs it, also add up the attention of
        the queries below `count_to`.

        `queries` [heads, tokens of the pass, head_dim]. The KV of these tokens must be in the cache. `together`: see
        `KeptQueries.take`.
        """
        if layer in held.mass:
            self._count(layer, held, queries)
        held.queries.take(layer, queries, together)

    def _count(self, layer: int, held: FullHeld, queries: Tensor) -> None:
        """Add the attention of settled queries, earlier ones that wait included. `queries`: of the last tokens."""
        counted = held.mass[layer].shape[1]
        if counted == held.count_to:
            return
        first = held.queries.positions.stop - queries.shape[1]
        if waiting := held.queries.pieces(layer, counted, first):
            queries, first = torch.cat([*waiting, queries], dim=1), counted
        pool_keys, _ = self.on_device(layer)
        ranges = sliced(held.ranges, 0, held.count_to)
        keys = (torch.cat([head[start:stop] for start, stop in ranges]) for head in pool_keys)
        settled = queries[:, counted - first : held.count_to - first]
        held.mass[layer] = with_more(held.mass[layer], settled, keys)

    @torch.inference_mode()
    def cut(
        self, sequence_id: int, position: int, chunks: ChunkSettings, selector: Selector, base: int = 0
    ) -> Snapshot:
        """A sparse copy of the sequence's KV below `position`, which must be settled and held: the first chunk, the
        recent window, and the chunks that the selector ranks highest, per layer and KV head. As changes to version
        `base` if that is the latest or its base and fits; otherwise whole, in the text's order.
        """
        return SnapshotCutter(self, self.held[sequence_id], position, chunks, selector).cut(sequence_id, base)

    def read(self, layers: Tensor, kv_heads: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of keys and values, [*shape, head_dim] each, on the device that computes.

        `layers`, `kv_heads` and `slots` broadcast to `shape`, and `layers` differ in the first dimension only, in which
        they ascend.
        """
        pool = self.pools[0].flatten(0, 3)
        rows, behind = self.rows(layers, kv_heads, slots)
        return pool[rows], pool[rows + behind]

    def moved(self, tensor: Tensor) -> Tensor:
        """A part of a pool, or what was computed of it, on the device that computes."""
        return tensor
