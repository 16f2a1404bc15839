"""When a pass hangs: by its size and by what passes took before."""

from __future__ import annotations

import pytest

from actors.pass_times import PassTimes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def times(clock: Clock) -> PassTimes:
    return PassTimes(clock)


def run(times: PassTimes, clock: Clock, tokens: int, seconds: float) -> None:
    times.begin()
    clock.now += seconds
    times.end(tokens, woken=0.0)


def test_a_pass_of_a_new_size_may_take_a_minute(times: PassTimes, clock: Clock) -> None:
    """In the first passes after a start, kernels are loaded. But a pass that takes longer than a minute hangs."""
    for size in (9, 100):
        times.begin()
        clock.now += 59.9
        assert not times.hangs(size, woken=0.0)
        clock.now += 0.2
        assert times.hangs(size, woken=0.0)
        times.began = None
        run(times, clock, 9, 0.05)


def test_a_pass_may_take_ten_seconds_in_any_case(times: PassTimes, clock: Clock) -> None:
    run(times, clock, 9, 0.05)
    times.begin()
    clock.now += 9.9
    assert not times.hangs(9, woken=0.0)
    clock.now += 0.2
    assert times.hangs(9, woken=0.0)
    times.end(9, woken=0.0)
    clock.now += 1e6
    assert not times.hangs(9, woken=0.0), "nothing to do is no hang"


@pytest.mark.parametrize(
    ("tokens", "limit_s"),
    [
        (9, 5 * 4.0),  # no less than any pass: its context may be longer than before
        (2048, 5 * 4.0),  # the longest of this size counts
        (3000, 5 * 4.0 * 3000 / 2048),
        (2500, 5 * 4.0 * 2500 / 2048),
        (32768, 5 * 4.0 * 16),  # a size that was never seen: as the largest below it, and so many times longer
        (100, 60.0),  # a new size, though a smaller one was seen
        (1, 60.0),
    ],
)
def test_a_pass_may_take_five_times_as_long_as_such_a_pass_took(
    times: PassTimes, clock: Clock, tokens: int, limit_s: float
) -> None:
    for size, seconds in ((9, 0.05), (2048, 4.0), (2300, 3.0), (9, 0.01)):
        run(times, clock, size, seconds)
    assert times.limit_s(tokens) == pytest.approx(limit_s)


def test_a_larger_pass_is_not_granted_less_than_any_smaller_size(times: PassTimes, clock: Clock) -> None:
    """A turn in which nothing was judged takes no time, whatever was asked."""
    run(times, clock, 9, 8.0)
    run(times, clock, 40, 0.001)
    assert times.limit_s(40) == times.limit_s(9) == 40.0


def test_waiting_for_other_tiers_is_no_pass(times: PassTimes, clock: Clock) -> None:
    run(times, clock, 9, 0.05)
    times.begin()
    clock.now += 60
    assert times.hangs(9, woken=0.0)
    assert not times.hangs(9, woken=clock.now - 1)
    times.end(9, woken=clock.now - 1)
    assert times.limit_s(9) == 10.0, "what counts is one second"
