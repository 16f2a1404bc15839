"""The pool's allocator never lends a slot twice, loses none, and uses every last one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triforce_core.kv.ranges import Range, RangeAllocator, sliced


def slots(ranges: list[Range]) -> list[int]:
    return [slot for start, stop in ranges for slot in range(start, stop)]


@given(st.integers(0, 60), st.lists(st.integers(0, 25) | st.just(-1), max_size=60), st.randoms(use_true_random=False))
def test_slots_are_lent_once_and_all_come_back(num_slots: int, steps: list[int], rng) -> None:  # type: ignore[no-untyped-def]
    """Allocations of each step's size; -1 gives one of them back."""
    allocator, lent = RangeAllocator(num_slots), []
    for count in steps:
        taken = sum(len(slots(ranges)) for ranges in lent)
        assert allocator.num_free == num_slots - taken
        if count == -1:
            if lent:
                allocator.free(lent.pop(rng.randrange(len(lent))))
            continue
        ranges = allocator.allocate(count)
        assert (ranges is None) == (count > num_slots - taken), "whatever is free can be used, in pieces if need be"
        if ranges is not None:
            assert len(slots(ranges)) == count
            lent.append(ranges)
        everything = slots([r for ranges in lent for r in ranges])
        assert len(set(everything)) == len(everything), "a slot was lent twice"
        assert set(everything) <= set(range(num_slots))
    for ranges in lent:
        allocator.free(ranges)
    assert allocator.allocate(num_slots) in ([(0, num_slots)], []), "freed neighbours become one range again"


def test_a_fragmented_pool_gives_several_ranges() -> None:
    allocator = RangeAllocator(50)
    held = [allocator.allocate(10) for _ in range(5)]
    for index in (1, 3):
        allocator.free(held[index] or [])
    ranges = allocator.allocate(15)
    assert ranges is not None
    assert len(ranges) == 2
    assert len(set(slots(ranges)) & {*range(10, 20), *range(30, 40)}) == 15
    assert allocator.allocate(6) is None
    assert len(slots(allocator.allocate(5) or [])) == 5


def test_the_tightest_fit_keeps_large_ranges_whole() -> None:
    allocator = RangeAllocator(100)
    small, wall = allocator.allocate(10), allocator.allocate(10)
    assert small is not None
    assert wall is not None
    allocator.free(small)
    assert allocator.allocate(8) == [(small[0][0], small[0][0] + 8)]
    assert allocator.allocate(80) is not None


def test_freeing_twice_is_our_own_mistake() -> None:
    allocator = RangeAllocator(20)
    ranges = allocator.allocate(5)
    assert ranges is not None
    allocator.free(ranges)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(ranges)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 9)), max_size=6), st.integers(0, 60), st.integers(0, 60))
def test_a_slice_of_a_path_is_the_slice_of_its_slots(pieces: list[Range], start: int, stop: int) -> None:
    path = [(first, first + length) for first, length in pieces]
    assert slots(sliced(path, start, stop)) == slots(path)[start:stop]


def test_wished_slots_are_given_last() -> None:
    """An owner's wish moves with the end of its range, and ends when the range is freed."""
    allocator = RangeAllocator(100)
    [first] = allocator.allocate(10, wish=40) or []
    assert allocator.allocate(20) == [(50, 70)]
    assert allocator.extend(first, 10, 15) == (0, 25)
    assert allocator.allocate(30) == [(70, 100)], "the rest of the wish, up to 50, is kept"
    assert allocator.allocate(10) == [(40, 50)], "from its end, when nothing else is free"
    allocator.free([(0, 25)])
    assert not allocator.wishes
    assert allocator.allocate(40) == [(0, 40)]


def test_a_range_is_extended_by_what_is_free_behind_it() -> None:
    allocator = RangeAllocator(100)
    [first], [wall] = allocator.allocate(10) or [], allocator.allocate(10) or []
    assert allocator.extend(first, 1, 5) is None
    assert allocator.allocate(70) == [(20, 90)]
    allocator.free([wall])
    assert allocator.extend(first, 11, 20) is None
    assert allocator.extend(first, 3, 8) == (0, 18)
    assert allocator.extend((0, 18), 1, 8) == (0, 20)
    assert allocator.free_ranges == [(90, 100)]


def test_few_ranges_are_enough_or_none_are_taken() -> None:
    allocator = RangeAllocator(50)
    held = [allocator.allocate(10) for _ in range(5)]
    for index in (0, 2, 4):
        allocator.free(held[index] or [])
    assert allocator.plan(25, most_ranges=2) is None
    assert allocator.allocate(25, most_ranges=2) is None
    assert allocator.num_free == 30
    assert len(allocator.allocate(25, most_ranges=3) or []) == 3
