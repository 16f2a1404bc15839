"""All-pairs test design: few combinations, in which every pair of values of any two factors occurs together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

Pair = tuple[str, Hashable, str, Hashable]


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(sorted(row), 2)}


def all_pairs(factors: Mapping[str, Sequence[Hashable]], seed: int, candidates: int = 30) -> list[dict[str, Any]]:
    """Rows that cover every pair; greedy: each row starts from an uncovered pair, the best of some random ones."""
    rng = random.Random(seed)
    names = sorted(factors)
    missing = {
        (a, x, b, y) for a, b in itertools.combinations(names, 2) for x, y in itertools.product(factors[a], factors[b])
    }
    rows = []
    while missing:
        a, x, b, y = rng.choice(sorted(missing, key=repr))
        tries = [{n: rng.choice(factors[n]) for n in names} | {a: x, b: y} for _ in range(candidates)]
        best = max(tries, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        rows.append(best)
    return rows
