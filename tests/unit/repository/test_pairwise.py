"""The generator of covering sets keeps its promise, with few rows."""

from __future__ import annotations

import itertools

import pytest

from tests.pairwise import all_pairs


@pytest.mark.parametrize(
    ("sizes", "most"), [([2, 2], 4), ([4, 4], 16), ([4, 2, 4, 3, 3, 2, 3, 3, 2], 26), ([3] * 8, 22)], ids=str
)
def test_every_pair_occurs(sizes: list[int], most: int) -> None:
    factors = {f"f{i}": list(range(size)) for i, size in enumerate(sizes)}
    rows = all_pairs(factors, seed=1)
    for (a, values_a), (b, values_b) in itertools.combinations(factors.items(), 2):
        for pair in itertools.product(values_a, values_b):
            assert any((row[a], row[b]) == pair for row in rows)
    assert len(rows) <= most
    assert rows == all_pairs(factors, seed=1), "the same seed gives the same rows"
