"""Attention over ranges that are tensors: how they are cut, and that what comes out is the textbook's."""

from __future__ import annotations

import itertools
from random import Random

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.trees import any_parents, before, seen
from tests.unit.core.attention.test_attention import textbook
from triforce_core.attention import Scoring
from triforce_core.attention.ranged import LEAST_KEYS, WorkItems, attend, cut, gathered, num_splits

HEAD_DIM, LONGEST = 8, 600


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 5000)), max_size=4).flatmap(
        lambda parts: st.tuples(st.just(parts), st.integers(max(1, len(parts)), 40))
    )
)
@example(([], 3))
@example(([(0, LEAST_KEYS + 1)], 2))
@example(([(0, 1000), (1, 1000)], 2))
@example(([(7, 900), (1, 100)], 3))
def test_pieces_are_the_whole_ranges_in_order(case: tuple[list[tuple[int, int]], int]) -> None:
    parts, splits = case
    stops = [*itertools.accumulate(gap + length for gap, length in parts)]
    ranges = [(stop - length, stop) for stop, (_, length) in zip(stops, parts, strict=True)]
    pieces = cut(ranges, splits)
    assert len(pieces) == splits
    read = [slot for first, count in pieces for slot in range(first, first + count)]
    assert read == [slot for start, stop in ranges for slot in range(start, stop)]
    ends = {stop for _, stop in ranges}
    assert all(n >= LEAST_KEYS or first + n in ends for first, n in pieces if n), "only the last of a range is short"
    share = -(-sum(length for _, length in parts) // max(1, splits - len(parts) + 1))
    assert max(count for _, count in pieces) <= max(LEAST_KEYS, share), "none does more than its share"


@given(st.integers(1, 200), st.integers(1, 16), st.integers(1, 32), st.integers(1, 140_000))
@example(132, 1, 8, 131_072)
def test_every_worker_has_an_item_as_far_as_there_is_work(
    workers: int, sequences: int, kv_heads: int, longest: int
) -> None:
    splits = num_splits(workers, sequences, kv_heads, longest)
    assert splits >= 1
    assert splits == 1 or longest // splits >= LEAST_KEYS
    assert splits == 1 or sequences * kv_heads * splits <= workers
    assert sequences * kv_heads * (splits + 1) > workers or longest // (splits + 1) < LEAST_KEYS, "no fewer than that"


lengths_of = st.lists(st.one_of(st.just(0), st.integers(0, LONGEST)), min_size=1, max_size=4)


@given(
    lengths_of, st.sampled_from([1, 2, 3, 5, 40]), st.integers(1, 3), st.sampled_from([1, 3]), st.sampled_from([1, 2])
)
@example([0, LONGEST, 257], 4, 3, 2, 2)
def test_attention_is_that_of_the_textbook(
    lengths: list[int], queries: int, splits: int, group: int, kv_heads: int
) -> None:
    """Ranges anywhere in the pool, in any order; whatever nobody may read is NaN. The last tokens of some sequences are
    trees.
    """
    random, rng = torch.Generator().manual_seed(sum(lengths) + queries), Random(sum(lengths) + queries)
    of_trees = [any_parents(rng, rng.choice([0, rng.randrange(queries + 1)])) for _ in lengths]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    starts = [(LONGEST + 10) * place + 5 for place in torch.randperm(len(lengths), generator=random).tolist()]
    pool = torch.full((2, kv_heads, (LONGEST + 10) * len(lengths), HEAD_DIM), torch.nan)
    for start, length in zip(starts, lengths, strict=True):
        pool[:, :, start : start + length] = normal(2, kv_heads, length, HEAD_DIM)
    tokens = len(lengths) * queries
    query = 2 * normal(group * kv_heads, tokens, HEAD_DIM)
    keys, values = normal(2, kv_heads, tokens, HEAD_DIM)
    pieces = [p for start, length in zip(starts, lengths, strict=True) for p in cut([(start, start + length)], splits)]
    items = work_items(pieces, splits)
    output = attend(gathered, query, keys, values, (pool[0], pool[1]), Scoring(0.3), items, seen(queries, of_trees))
    for i, (start, length, parents) in enumerate(zip(starts, lengths, of_trees, strict=True)):
        for token in range(i * queries, (i + 1) * queries):
            own = [i * queries + n for n in before(queries - len(parents), parents, token - i * queries)]
            all_keys, all_values = (
                torch.cat([cached[:, start : start + length], new[:, own]], dim=1)
                for cached, new in zip(pool, (keys, values), strict=True)
            )
            expected, _ = textbook(query[:, [token]], all_keys, all_values, 0.3, causal=False)
            torch.testing.assert_close(output[[token]].transpose(0, 1).double(), expected, atol=1e-5, rtol=0)


def work_items(pieces: list[tuple[int, int]], splits: int) -> WorkItems:
    starts, lengths = (torch.tensor(numbers, dtype=torch.int32) for numbers in zip(*pieces, strict=True))
    return WorkItems(starts, lengths, LONGEST, splits)


def test_an_empty_item_counts_for_nothing() -> None:
    pool = torch.full((1, 10, HEAD_DIM), torch.nan)
    part = gathered(torch.randn(2, 3, 1, HEAD_DIM), pool, pool, 0.3, work_items([(0, 0), (9, 0)], 1))
    assert part.output.eq(0).all()
    assert part.lse.eq(-torch.inf).all()
