"""Ranges of slots in a pool: allocation, and the ranges of some of a sequence's tokens. Plain integers, no tensors."""

from __future__ import annotations

from collections.abc import Iterator

Range = tuple[int, int]  # [start, stop)


class RangeAllocator:
    """Allocates ranges of a pool of `num_slots` slots, multiples of `unit`: one range if one fits, several if the pool
    is fragmented. The owner of a range may wish for the slots behind it, to grow in place; others get these only when
    no other free range is long enough.
    """

    def __init__(self, num_slots: int, unit: int = 1) -> None:
        assert num_slots % unit == 0, "a pool is whole units"
        self.num_slots, self.unit = num_slots, unit
        self.free_ranges: list[Range] = [(0, num_slots)] if num_slots else []  # sorted, never adjacent
        self.wishes: dict[int, int] = {}  # by the end of an owned range, how many slots behind it its owner wishes for

    @property
    def num_free(self) -> int:
        return sum(stop - start for start, stop in self.free_ranges)

    def plan(self, count: int, most_ranges: int | None = None, wish: int = 0) -> list[Range] | None:
        """What `allocate` would return."""
        if not count:
            return []
        count, wish = rounded_up(count, self.unit), rounded_up(wish, self.unit)
        unwished = [(min(stop, start + self.wishes.get(start, 0)), stop) for start, stop in self.free_ranges]
        for size in (count + wish, count):
            if (fitting := smallest(unwished, size)) is not None:
                return [(fitting[0], fitting[0] + count)]
        if (fitting := smallest(self.free_ranges, count)) is not None:
            # Take the last slots of this free range, because the owner of the slots right before the range may wish for
            # its first ones.
            return [(fitting[1] - count, fitting[1])]
        taken: list[Range] = []
        for start, stop in sorted(self.free_ranges, key=lambda r: r[0] - r[1])[:most_ranges]:
            size = min(count, stop - start)
            taken.append((start, start + size))
            count -= size
            if not count:
                return taken
        return None

    def allocate(self, count: int, most_ranges: int | None = None, wish: int = 0) -> list[Range] | None:
        """`count` slots in few ranges, with a wish for `wish` more behind the last; None if there is no room."""
        planned = self.plan(count, most_ranges, wish)
        if planned is not None:
            self.take(planned, wish)
        return planned

    def take(self, planned: list[Range], wish: int = 0) -> None:
        """Allocate what `plan` returned, with a wish for `wish` more slots behind it."""
        for taken in planned:
            self._take(taken)
        if planned and wish:
            self.wishes[planned[-1][1]] = rounded_up(wish, self.unit)

    def extend(self, owned: Range, least: int, most: int) -> Range | None:
        """The range `owned` with `least` to `most` of the slots behind it; None if fewer are free there."""
        start, stop = owned
        room = self.room_at(stop)
        if room < least:
            return None
        size, wish = min(room, rounded_up(most, self.unit)), self.wishes.pop(stop, 0)
        self._take((stop, stop + size))
        if wish > size:
            self.wishes[stop + size] = wish - size
        return start, stop + size

    def room_at(self, slot: int) -> int:
        """How many slots are free from this one on."""
        return next((stop - slot for start, stop in self.free_ranges if start <= slot < stop), 0)

    def _take(self, taken: Range) -> None:
        """Remove a range of free slots from the free ranges."""
        around = next(r for r in self.free_ranges if r[0] <= taken[0] and taken[1] <= r[1])
        self.free_ranges.remove(around)
        self.free_ranges += [r for r in ((around[0], taken[0]), (taken[1], around[1])) if r[0] < r[1]]
        self.free_ranges.sort()

    def free(self, ranges: list[Range]) -> None:
        """Return ranges to the pool; adjacent free ranges are merged."""
        self.free_ranges = united([*self.free_ranges, *ranges])
        for _, stop in ranges:
            self.wishes.pop(stop, None)

    def with_free(self, more: list[Range]) -> RangeAllocator:
        """A copy of this allocator in which these ranges are free as well."""
        other = RangeAllocator(self.num_slots, self.unit)
        other.free_ranges, other.wishes = united([*self.free_ranges, *more]), self.wishes
        return other


def united(ranges: list[Range]) -> list[Range]:
    """The same slots in ascending order, adjacent ranges merged. No slot may be in two of the ranges."""
    merged = union(ranges)
    assert size_of(merged) == size_of(ranges), "a slot was freed twice"
    return merged


def rounded_up(count: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not less than `count`."""
    return -(-count // unit) * unit


def smallest(ranges: list[Range], count: int) -> Range | None:
    """The smallest of the ranges with at least `count` slots; None if none has."""
    return min((r for r in ranges if r[1] - r[0] >= count), key=lambda r: r[1] - r[0], default=None)


def size_of(ranges: list[Range]) -> int:
    """The number of slots in the ranges."""
    return sum(stop - start for start, stop in ranges)


def sliced(ranges: list[Range], start: int, stop: int) -> list[Range]:
    """The slots of tokens [start, stop) of a sequence whose tokens fill `ranges` in order."""
    out, offset = [], 0
    for first, last in ranges:
        low, high = max(start, offset), min(stop, offset + last - first)
        if low < high:
            out.append((first + low - offset, first + high - offset))
        offset += last - first
    return out


def without(ranges: list[Range], gone: list[Range]) -> list[Range]:
    """The slots of `ranges` that are in none of the ranges `gone`, in the same order."""
    for first, last in gone:
        ranges = [
            piece
            for start, stop in ranges
            for piece in ((start, min(stop, first)), (max(start, last), stop))
            if piece[0] < piece[1]
        ]
    return ranges


def paired(ranges: list[Range], others: list[Range]) -> Iterator[tuple[Range, Range]]:
    """Two lists with equally many slots, cut into pieces that lie within one range of each."""
    waiting, other_waiting = [*ranges[::-1]], [*others[::-1]]
    while waiting:
        (first, last), (start, stop) = waiting.pop(), other_waiting.pop()
        size = min(last - first, stop - start)
        yield (first, first + size), (start, start + size)
        if first + size < last:
            waiting.append((first + size, last))
        if start + size < stop:
            other_waiting.append((start + size, stop))


def union(ranges: list[Range]) -> list[Range]:
    """The slots that are in any of the ranges, each once: ascending, never adjacent."""
    out: list[Range] = []
    for start, stop in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out
