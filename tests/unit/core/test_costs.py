"""The cost model finds the prices of passes from the passes, and invents no fixed cost."""

from __future__ import annotations

import random

import numpy as np
import pytest

from triforce_core.costs import LONG_REMEMBERED, REMEMBERED, Part, PassCosts, size_of

FIXED, ROW, TOKEN, KEY, PAIR = 5e-3, 3e-4, 1.2e-4, 2e-7, 4e-8  # seconds


def seconds_of(parts: list[Part]) -> float:
    """What such a pass takes on an imagined machine."""
    return FIXED + sum(
        ROW + TOKEN * tokens + KEY * (read * before + tokens) + PAIR * tokens * (before + (tokens + 1) / 2)
        for tokens, before, read in parts
    )


def costs_of(passes: list[list[Part]], *, noise: float = 0.0) -> PassCosts:
    rng, costs = random.Random(0), PassCosts()
    for parts in passes:
        costs.add(parts, seconds_of(parts) * rng.lognormvariate(0, noise))
    return costs


WARM_UP = [[Part(64, 0)], [Part(64, 0)], [Part(2048, 0)], *([Part(2048, n)] for n in range(0, 8192, 2048))]
MIXED = [[Part(9, 4000 + n), Part(128, 128 * n)] for n in range(100)]


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("parts", [[Part(64, 0)], [Part(512, 8192)], [Part(9, 5000), Part(256, 12_000)]], ids=str)
def test_passes_of_other_sizes_are_foretold(parts: list[Part], noise: float) -> None:
    costs = costs_of([*WARM_UP, *MIXED], noise=noise)
    assert costs.seconds(parts) == pytest.approx(seconds_of(parts), rel=0.1)


def test_the_passes_of_a_warm_up_foretell_those_like_them() -> None:
    costs = costs_of(WARM_UP)
    for parts in ([Part(64, 0)], [Part(1024, 0)], [Part(2048, 6144)]):
        assert costs.seconds(parts) == pytest.approx(seconds_of(parts), rel=0.15)


def test_passes_of_one_size_show_no_fixed_cost() -> None:
    """Such passes cannot tell a fixed cost from a price of tokens. If a chunk were taken for mostly fixed cost, it
    would stay large.
    """
    costs = costs_of([[Part(2048, 0)]] * 50)
    assert costs.seconds([Part(2048, 0)]) == pytest.approx(seconds_of([Part(2048, 0)]), rel=0.01)
    assert costs.least_chunk(0) < 100


def test_half_of_a_pass_over_the_least_chunk_is_fixed_cost() -> None:
    costs = costs_of([*WARM_UP, *MIXED])
    for before in (0, 4000, 12_000):
        fixed = FIXED + ROW + KEY * before
        assert costs.least_chunk(before) == pytest.approx(fixed / (TOKEN + PAIR * before), rel=0.5)


def test_short_prompts_do_not_make_long_ones_forgotten() -> None:
    """Otherwise the first chunk of a long prompt would be of any size after many short ones."""
    short = [[Part(64 + 7 * (n % 50), 0)] for n in range(300)]
    costs = costs_of([*WARM_UP, *MIXED, *short], noise=0.1)
    long = [Part(256, 12_000)]
    assert costs.seconds(long) == pytest.approx(seconds_of(long), rel=0.25)
    assert costs.least_chunk(12_000) < 64


def test_small_passes_have_prices_of_their_own() -> None:
    costs = PassCosts()
    for _ in range(10):
        costs.add([Part(9, 4000)], 0.030)
        costs.add([Part(2048, 4000)], 0.300)
    assert costs.seconds([Part(9, 4000)]) == pytest.approx(0.030, rel=0.01)
    assert costs.seconds([Part(2048, 4000)]) == pytest.approx(0.300, rel=0.01)


def test_later_passes_count_for_more() -> None:
    costs = costs_of(MIXED)
    for parts in MIXED:
        costs.add(parts, 3 * seconds_of(parts))
    assert costs.seconds(MIXED[-1]) == pytest.approx(3 * seconds_of(MIXED[-1]), rel=0.2)


def test_passes_that_are_fitted_together_count_by_their_age_and_by_the_prices_before() -> None:
    costs = PassCosts()
    lately = ever = np.zeros((6, 7))
    for first, last in ((0, 7), (7, 27)):
        prices = costs.few.prices
        for n in range(first, last):
            parts, seconds = [Part(1 + n % 5, 100 * n)], 1e-3 * (1 + n % 7) ** 3
            costs.add(parts, seconds)
            size = size_of(parts)
            foretold = float(prices @ size) or seconds
            weight = 1 / (seconds * min(max(foretold, seconds / 10), seconds * 10))
            evidence = weight * np.outer(size, [*size, seconds])
            lately, ever = REMEMBERED * lately + evidence, LONG_REMEMBERED * ever + evidence
        costs.few.fitted()
    assert costs.few.lately == pytest.approx(lately)
    assert costs.few.ever == pytest.approx(ever)


def test_nothing_is_known_before_the_first_large_pass() -> None:
    costs = PassCosts()
    assert not costs.known
    costs.add([Part(9, 100)], 0.01)
    assert not costs.known
    assert (costs.seconds([Part(100, 0)]), costs.least_chunk(0)) == (0.0, 0.0)
    costs.add([Part(64, 100)], 0.01)
    assert costs.known


def test_one_slow_pass_does_not_weigh_too_much() -> None:
    """The pass is ten times as slow, as when another program takes the core."""
    costs = costs_of(MIXED)
    costs.add(MIXED[-1], 10 * seconds_of(MIXED[-1]))
    assert costs.seconds(MIXED[-1]) < 1.15 * seconds_of(MIXED[-1])
    for _ in range(20):
        costs.add(MIXED[-1], 2 * seconds_of(MIXED[-1]))
    learned = costs.seconds(MIXED[-1])
    assert learned > 1.4 * seconds_of(MIXED[-1]), "what lasts is learned, however fast it was"


@pytest.mark.parametrize("seed", range(5))
def test_no_price_is_negative(seed: int) -> None:
    """Whatever the passes took, a longer chunk never costs less."""
    rng, costs = random.Random(seed), PassCosts()
    for _ in range(30):
        parts = [Part(rng.randrange(64, 2048), rng.randrange(50_000)) for _ in range(rng.randint(1, 3))]
        costs.add(parts, rng.uniform(0.001, 1.0))
        assert (costs.many.fitted() >= 0).all()
        assert costs.seconds([Part(2000, 10_000)]) >= costs.seconds([Part(1000, 10_000)]) >= 0
