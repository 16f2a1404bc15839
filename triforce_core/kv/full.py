"""The target's cache: the exact KV of every token. kv/cutting.py cuts the snapshots for the retrieval tier."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from triforce_core.attention import ChunkSums, Kernel, torch_chunk_sums
from triforce_core.kv.base import Batch, Held, KVCache, KVGeometry, Placement, joined
from triforce_core.kv.cutting import SnapshotCutter
from triforce_core.kv.full_held import FullHeld
from triforce_core.kv.kept_queries import KeptQueries
from triforce_core.kv.landmarks import LandmarkPool
from triforce_core.kv.mass import with_more
from triforce_core.kv.prefix_tree import Cursor, PrefixTree
from triforce_core.kv.ranges import Range, RangeAllocator, paired, rounded_up, size_of, sliced
from triforce_core.kv.selectors import SELECTORS, Landmark, Selector
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.messages import SequenceSpec

MOST_RANGES = 4  # most ranges of a sequence: attention runs over each, and captured passes have no room for more
SHARED_RANGES = 2  # most ranges that a sequence may share with others, so that some ranges are left for its growth
FIRST_GROWTH = 256  # tokens by which a sequence grows first; each further growth doubles them
LEAST_GROWTH = 64  # tokens of a new range in a pool that is nearly full
# A pass over at least this number of tokens of a sequence computes the landmarks of their chunks. After shorter passes
# the next cut computes the landmarks of several passes together, at less cost per chunk.
LEAST_FILLED = 64
# Most slots that a sequence wishes for behind its last range. Others get these slots only if no other range is long
# enough.
LIKELY_GROWTH = 4096


class FullKV(KVCache):
    """Each sequence owns slots for the tokens that it has, and for some more. `grow` adds slots.

    Where texts are shared, the KV of a text stays in the pool when its sequence ends. Even before that, while its
    prompt is still being read, others may use the KV that is already there (kv/prefix_tree.py). Kept texts that nobody
    uses are dropped when slots are needed, even if enough are free but lie in too many ranges.
    """

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
    ) -> None:
        """`unit`: tokens of a chunk; ranges begin and end at whole chunks, and `pool_tokens` is rounded up to them.
        `landmark`: what is kept of each chunk for selectors. `chunk_sums`: how selectors that weigh all keys do so.
        """
        super().__init__(geometry, rounded_up(pool_tokens, unit), kernel, pools)
        self.chunk_sums = chunk_sums
        self.allocator = RangeAllocator(self.dump_slot, unit)
        self.shares, self.tree = shares, PrefixTree(unit, self.allocator.free)
        self.landmarks = LandmarkPool(landmark, unit, geometry, self.keys) if landmark else None

    def new_held(self, spec: SequenceSpec, ranges: list[Range]) -> FullHeld:
        num_queries, queries = SELECTORS[spec.selector]().num_queries, KeptQueries(self.geometry.num_layers)
        held = FullHeld(spec, ranges=ranges, next_growth=FIRST_GROWTH, queries=queries, num_queries=num_queries)
        if num_queries is None:
            nothing = torch.zeros(self.geometry.num_kv_heads, 0, device=self.geometry.device)
            held.mass = [nothing] * self.geometry.num_layers
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
        return self._beginning(spec, tokens, cursor) is not None

    def open(
        self, sequence_id: int, spec: SequenceSpec, tokens: int | None = None, text: Sequence[int] = ()
    ) -> FullHeld | None:
        """Make room for `tokens` tokens of a new sequence, by default for its greatest length; None when the pool has
        none. `text`: what will be stated first. The KV of its beginning may be there; `cached` says how much.
        """
        tokens, known = self.slots_for(spec) if tokens is None else tokens, list(text)
        cursor = self.look(spec, known)
        beginning = self._beginning(spec, tokens, cursor)
        if beginning is None:
            return None
        matched, shared = beginning
        # The matched nodes are in use from here on, so that no room is made by dropping them.
        node = self.tree.enter(spec.cache_salt, cursor.node if cursor else None, matched)
        there = self.tree.ranges(node, matched)
        most_ranges = MOST_RANGES - len(joined([], sliced(there, 0, shared)))
        own = self._allocate(tokens - shared, most_ranges, wish(spec, tokens))
        if shared < matched:
            self._copy(sliced(there, shared, matched), sliced(own, 0, matched - shared))
            upper = self.tree.enter(spec.cache_salt, node, shared)
            self.tree.leave(node)
            node = upper
        held = self.held[sequence_id] = self.new_held(spec, joined(sliced(there, 0, shared), own))
        held.tokens, held.cached = known[:matched], matched
        # 0: nothing is given to the tree while the prompt is read. If logprobs of the prompt are asked for, each chunk
        # starts with the last token of the previous chunk. The slot of this token is written twice, which is forbidden
        # for slots that were given to the tree.
        held.told = len(known) if spec.prompt_logprobs is None else 0
        held.node, held.given = node, [(0, shared)] if shared else []
        return held

    def _beginning(self, spec: SequenceSpec, tokens: int, cursor: Cursor | None) -> tuple[int, int] | None:
        """How many tokens of the text to match, and how many of these to share, so that there is room for `tokens`
        tokens; None if there is none. Matched KV beyond `SHARED_RANGES` ranges is copied, because a sequence needs some
        of its ranges for growth. In a full pool less is matched, because matched KV cannot be dropped.
        """
        matched = self.tree.advance(cursor) if cursor else 0
        there = joined([], self.tree.ranges(cursor.node, matched)) if cursor else []
        shared = size_of(there[:SHARED_RANGES])
        for beginning in dict.fromkeys(((matched, shared), (shared, shared), (0, 0))):
            if self._fits(spec, tokens, beginning, cursor, len(there)):
                return beginning
        return None

    def _fits(
        self, spec: SequenceSpec, tokens: int, beginning: tuple[int, int], cursor: Cursor | None, num_ranges: int
    ) -> bool:
        matched, shared = beginning
        count, most_ranges = tokens - shared, MOST_RANGES - (min(num_ranges, SHARED_RANGES) if shared else 0)
        if self.allocator.plan(count, most_ranges) is not None:
            return True
        if count > self.allocator.num_free + self.kept_tokens:
            return False
        idle = self.tree.idle_ranges(cursor.node, matched) if cursor else self.tree.idle_ranges()
        return self.allocator.with_free(idle).plan(count, most_ranges) is not None

    def _allocate(self, count: int, most_ranges: int, wished: int) -> list[Range]:
        """Slots in at most `most_ranges` ranges, for which the caller has checked the room and kept texts may be
        dropped. First in at most `SHARED_RANGES`, all of which later sequences can share, with one left if growth is
        `wished`; not in one at any price, which might drop most kept texts.
        """
        few = max(1, min(SHARED_RANGES, most_ranges - bool(wished)))
        for most in dict.fromkeys((few, most_ranges)):
            plan = partial(self.allocator.plan, count, most, wished)
            if plan() is None and self.allocator.with_free(self.tree.idle_ranges()).plan(count, most) is not None:
                self._drop_until(plan)
            if (planned := plan()) is not None:
                self.allocator.take(planned, wished)
                return planned
        raise AssertionError("opened without room")

    def _drop_until(self, plan: Callable[[], list[Range] | None]) -> None:
        self.tree.drop_until(lambda: plan() is not None)

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
            self._give(held, min(held.cached, len(held.tokens) - held.drafted))
        if held.node is not None:
            self.tree.leave(held.node)
        self.allocator.free(held.own_ranges)
        self.allocator.wishes.pop(held.ranges[-1][1], None)

    def _give(self, held: FullHeld, stop: int) -> None:
        """Give the tree what it lacks of this text up to about `stop`. These slots are not written again."""
        stop = stop // self.tree.unit * self.tree.unit
        if held.node is not None and held.node.stop < stop:
            held.node, given = self.tree.insert(held.node, held.tokens, stop, held.ranges)
            held.given = joined(held.given, given)

    def spare(self, count: int) -> list[Range] | None:
        if count <= self.allocator.num_free + self.kept_tokens and self.allocator.num_free < count:
            self._drop_until(partial(self.allocator.plan, count))
        return super().spare(count)

    # -- growth --------------------------------------------------------------------------------------------------------

    def room(self, held: Held) -> int:
        return min(size_of(held.ranges), held.spec.max_length)

    def grow(self, sequence_id: int, tokens: int) -> bool:
        """Make sure that the sequence owns slots for `tokens` tokens; False when the pool has no room for them.

        It grows by more than it lacks, if it can: by twice as much as the last time. Tried in order: slots behind its
        last range; a new range of that size, dropping kept texts if needed; slots behind its last range, dropping kept
        texts; a smaller new range. With `MOST_RANGES` ranges it gets no new one.
        """
        held = self.held[sequence_id]
        owned = size_of(held.ranges)
        least, rest = tokens - owned, held.spec.max_length - owned
        if least <= 0:
            return True
        grown = self._extend(held, least, rest)
        if not self.hemmed_in(sequence_id):
            sizes = [max(least, min(growth, rest)) for growth in (held.next_growth, FIRST_GROWTH, LEAST_GROWTH)]
            grown = grown or self._add_range(held, sizes[0]) or self._extend(held, least, rest, dropping=True)
            grown = grown or any(self._add_range(held, size) for size in sizes[1:])
        else:
            grown = grown or self._extend(held, least, rest, dropping=True)
        if grown:
            held.next_growth *= 2
        return grown

    def _extend(self, held: FullHeld, least: int, rest: int, *, dropping: bool = False) -> bool:
        """Grow in place; `dropping`: into slots of kept texts, too."""
        stop = held.ranges[-1][1]
        if dropping:
            idle = self.tree.idle_ranges()
            if self.allocator.with_free(idle).room_at(stop) < least:
                return False
            while (room := self.allocator.room_at(stop)) < least:
                behind = self.tree.idle_at(stop + room)
                assert behind is not None
                self.tree.drop(behind)
        extended = self.allocator.extend(held.ranges[-1], least, max(least, min(held.next_growth, rest)))
        if extended is not None:
            held.ranges[-1] = extended
        return extended is not None

    def _add_range(self, held: FullHeld, size: int) -> bool:
        """Grow into a new range, for which kept texts are dropped."""
        plan = partial(self.allocator.plan, size, 1, wish(held.spec, size_of(held.ranges) + size))
        if plan() is None:
            if self.allocator.with_free(self.tree.idle_ranges()).plan(size, 1) is None:
                return False
            self._drop_until(plan)
        planned = plan()
        assert planned is not None
        self.allocator.wishes.pop(held.ranges[-1][1], None)  # only the last range grows
        self.allocator.take(planned, wish(held.spec, size_of(held.ranges) + size))
        held.ranges += planned
        return True

    def keys_after(self, tokens: int) -> int:
        return tokens

    def hemmed_in(self, sequence_id: int) -> bool:
        """Whether a sequence can grow in place only, because it has `MOST_RANGES` ranges."""
        return len(self.held[sequence_id].ranges) == MOST_RANGES

    def place(self, sequence_id: int, held: Held, keep: int, end: int, num_sampled: int) -> Placement:
        assert isinstance(held, FullHeld)
        assert end <= self.room(held), "a sequence grows before it is stated further"
        assert not held.given or held.given[-1][1] <= keep, "KV that others may use is not written again"
        held.cached = end
        held.roll_back(keep)
        if keep < end:
            held.expect_queries(keep, end, num_sampled)
        if self.shares and held.told:  # all but the last token of the prompt, which may be asked for again
            self._give(held, min(end - held.drafted, held.told - 1))
        writes = sliced(held.ranges, keep, end)
        if self.landmarks:
            self.landmarks.forget(writes)
        return Placement(
            tokens=held.tokens[keep:end],
            positions=range(keep, end),
            writes=writes,
            visible=sliced(held.ranges, 0, keep),
        )

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, batch: Batch) -> Tensor:
        output = super().attend(layer, query, keys, values, scale, batch)
        for row in batch.rows:
            own = query if len(batch.rows) == 1 else query[:, row.first : row.stop]
            self.take_queries(layer, self.held[row.sequence_id], own, query.shape[1])
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
        if held.mass:
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


def wish(spec: SequenceSpec, tokens: int) -> int:
    """How many slots a sequence that owns slots for `tokens` tokens wishes for behind them."""
    return max(0, min(LIKELY_GROWTH, spec.max_length - tokens))
