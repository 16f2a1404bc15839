"""Which slots of the target's pool each text has: its own, shared ones, and those that it grows into. No tensors here.

Where texts are shared, the KV of a text stays in the pool when its sequence ends. Even before that, while its prompt is
still being read, others may use the KV that is already there (kv/prefix_tree.py). Kept texts that nobody uses are
dropped when slots are needed, even if enough are free but lie in too many ranges.
"""

from collections.abc import Callable
from functools import partial

from triforce_core.kv.base import joined
from triforce_core.kv.full_held import FullHeld
from triforce_core.kv.prefix_tree import Cursor, PrefixTree
from triforce_core.kv.ranges import Range, RangeAllocator, size_of
from triforce_core.messages import SequenceSpec

MOST_RANGES = 4  # most ranges of a sequence: attention runs over each, and captured passes have no room for more
SHARED_RANGES = 2  # most ranges that a sequence may share with others, so that some ranges are left for its growth
FIRST_GROWTH = 256  # tokens by which a sequence grows first; each further growth doubles them
LEAST_GROWTH = 64  # tokens of a new range in a pool that is nearly full
# Most slots that a sequence wishes for behind its last range. Others get these slots only if no other range is long
# enough.
LIKELY_GROWTH = 4096


class TextSlots:
    """The slots of one pool, in whole chunks of `unit` slots."""

    def __init__(self, num_slots: int, unit: int) -> None:
        self.allocator = RangeAllocator(num_slots, unit)
        self.tree = PrefixTree(unit, self.allocator.free)

    def beginning(self, spec: SequenceSpec, tokens: int, cursor: Cursor | None) -> tuple[int, int] | None:
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
        if count > self.allocator.num_free + self.tree.idle_tokens:
            return False
        idle = self.tree.idle_ranges(cursor.node, matched) if cursor else self.tree.idle_ranges()
        return self.allocator.with_free(idle).plan(count, most_ranges) is not None

    def allocate(self, count: int, most_ranges: int, wished: int) -> list[Range]:
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

    def give(self, held: FullHeld, stop: int) -> None:
        """Give the tree what it lacks of this text up to about `stop`. These slots are not written again."""
        stop = stop // self.tree.unit * self.tree.unit
        if held.node is not None and held.node.stop < stop:
            held.node, given = self.tree.insert(held.node, held.tokens, stop, held.ranges)
            held.given = joined(held.given, given)

    def free(self, held: FullHeld) -> None:
        """Take back the slots of a text that ends, but for what was given to the tree."""
        if held.node is not None:
            self.tree.leave(held.node)
        self.allocator.free(held.own_ranges)
        self.allocator.wishes.pop(held.ranges[-1][1], None)

    def make_room(self, count: int) -> None:
        """Drop kept texts until `count` slots are free, if that helps."""
        if count <= self.allocator.num_free + self.tree.idle_tokens and self.allocator.num_free < count:
            self._drop_until(partial(self.allocator.plan, count))

    def grow(self, held: FullHeld, tokens: int) -> bool:
        """Make sure that the text owns slots for `tokens` tokens; False when the pool has no room for them.

        It grows by more than it lacks, if it can: by twice as much as the last time. Tried in order: slots behind its
        last range; a new range of that size, dropping kept texts if needed; slots behind its last range, dropping kept
        texts; a smaller new range. With `MOST_RANGES` ranges it gets no new one.
        """
        owned = size_of(held.ranges)
        least, rest = tokens - owned, held.spec.max_length - owned
        if least <= 0:
            return True
        grown = self._extend(held, least, rest)
        if len(held.ranges) < MOST_RANGES:
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


def wish(spec: SequenceSpec, tokens: int) -> int:
    """How many slots a sequence that owns slots for `tokens` tokens wishes for behind them."""
    return max(0, min(LIKELY_GROWTH, spec.max_length - tokens))
