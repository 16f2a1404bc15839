"""Ranges of slots in a pool: allocation, and the ranges of some of a sequence's tokens. Plain integers, no tensors."""

from __future__ import annotations

Range = tuple[int, int]  # [start, stop)


class RangeAllocator:
    """Allocates ranges of `num_slots` slots: one range if one fits, several if the pool is fragmented."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.free_ranges: list[Range] = [(0, num_slots)] if num_slots else []  # sorted, never adjacent

    @property
    def num_free(self) -> int:
        return sum(stop - start for start, stop in self.free_ranges)

    def allocate(self, count: int) -> list[Range] | None:
        """`count` slots, or None if fewer are free; from the smallest range that fits, otherwise the largest ranges."""
        if count > self.num_free:
            return None
        fitting = min((r for r in self.free_ranges if r[1] - r[0] >= count), key=lambda r: r[1] - r[0], default=None)
        by_size = [fitting] if fitting else sorted(self.free_ranges, key=lambda r: r[0] - r[1])
        taken: list[Range] = []
        for start, stop in by_size:
            size = min(count, stop - start)
            if not size:
                break
            taken.append((start, start + size))
            self.free_ranges.remove((start, stop))
            if start + size < stop:
                self.free_ranges.append((start + size, stop))
            count -= size
        self.free_ranges.sort()
        return taken

    def free(self, ranges: list[Range]) -> None:
        """Return ranges to the pool; adjacent free ranges are merged."""
        merged: list[Range] = []
        for start, stop in sorted([*self.free_ranges, *ranges]):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                assert not merged or merged[-1][1] < start, "a slot was freed twice"
                merged.append((start, stop))
        self.free_ranges = merged


def sliced(ranges: list[Range], start: int, stop: int) -> list[Range]:
    """The slots of tokens [start, stop) of a sequence whose tokens fill `ranges` in order."""
    out, offset = [], 0
    for first, last in ranges:
        low, high = max(start, offset), min(stop, offset + last - first)
        if low < high:
            out.append((first + low - offset, first + high - offset))
        offset += last - first
    return out
