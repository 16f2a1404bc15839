"""Attention in blocks: the bits of a query's result depend on the query and on the keys up to its own alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from triforce_core.attention.blocks import (
    BLOCK,
    by_operator,
    by_products,
    future,
    in_rows,
    merged,
    most_queries,
    of_heads,
    over_blocks,
    summed,
)
from triforce_core.attention.reference import reference

LENGTH, SCALE = 2 * BLOCK + 300, 0.1
HEADS = [(8, 8, 64), (9, 3, 64), (7, 1, 96), (4, 2, 80), (4, 1, 128), (3, 1, 256)]


@cache
def text(heads: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of all tokens; blocks are whole, with rubbish behind the last token."""
    query_heads, kv_heads, head_dim = heads
    random = torch.Generator().manual_seed(sum(heads))
    padded = -(-LENGTH // BLOCK) * BLOCK
    shapes = [(query_heads, LENGTH, head_dim), (kv_heads, padded, head_dim), (kv_heads, padded, head_dim)]
    query, keys, values = (torch.randn(shape, generator=random).to(dtype) for shape in shapes)
    keys[:, LENGTH:], values[:, LENGTH:] = 1e4, -1e4
    return query, keys, values


def blocks(tensor: Tensor, first: int, last: int) -> Tensor:
    return tensor[:, first * BLOCK : last * BLOCK].unflatten(1, (-1, BLOCK)).transpose(0, 1)


def attend(query: Tensor, keys: Tensor, values: Tensor, start: int, stop: int, kv_heads: int) -> Tensor:
    """The results of the tokens from `start` to `stop`, computed together as far as they lie in one block."""
    found = []
    while start < stop:
        block = start // BLOCK
        end = min(stop, (block + 1) * BLOCK)
        some = query[:, start:end]
        rows = in_rows(some, kv_heads)
        mask = future(start - block * BLOCK, end - start, rows)
        parts = [over_blocks(rows, blocks(keys, 0, block), blocks(values, 0, block), SCALE)] if block else []
        own = (blocks(each, block, block + 1) for each in (keys, values))
        found.append(of_heads(merged([*parts, over_blocks(rows, *own, SCALE, mask)]), len(query), end - start))
        start = end
    return torch.cat(found, dim=1)


@cache
def whole(heads: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    return attend(*text(heads, dtype), 0, LENGTH, heads[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@given(
    st.sampled_from(HEADS), st.integers(0, LENGTH - 1), st.sampled_from([*range(1, 18), 33, 100, 700]), st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_the_bits_of_a_query_do_not_depend_on_the_others(
    dtype: torch.dtype, heads: tuple[int, int, int], start: int, count: int, one_thread: bool
) -> None:
    stop, before = min(LENGTH, start + count), torch.get_num_threads()
    torch.set_num_threads(1 if one_thread else 2)
    try:
        found = attend(*text(heads, dtype), start, stop, heads[1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, whole(heads, dtype)[:, start:stop])


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.02), (torch.float32, 1e-5)], ids=str)
def test_it_is_attention(heads: tuple[int, int, int], dtype: torch.dtype, error: float) -> None:
    query, keys, values = text(heads, dtype)
    expected = reference(query.float(), keys[:, :LENGTH].float(), values[:, :LENGTH].float(), SCALE, True).output
    assert (whole(heads, dtype) - expected).abs().max() < error


@pytest.mark.parametrize("masked", [False, True])
def test_other_devices_compute_the_same(masked: bool) -> None:
    query, keys, values = text(HEADS[1], torch.float32)
    rows = in_rows(query[:, BLOCK : BLOCK + 5], 3)
    mask = future(7, 5, rows) if masked else None
    given = rows.expand(2, -1, -1, -1), blocks(keys, 0, 2), blocks(values, 0, 2), SCALE, mask
    for found, expected in zip(by_products(*given), by_operator(*given), strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 33])
def test_a_sum_has_one_order(count: int) -> None:
    terms = torch.randn(count, 3, 50)
    each = torch.stack([summed(terms[:, :, i].clone()) for i in range(50)], dim=-1)
    assert torch.equal(summed(terms.clone()), each)
    assert torch.allclose(each, terms.sum(0), atol=1e-5)


def test_rows_and_heads() -> None:
    query = torch.randn(2, 6, 5, 8)
    rows = in_rows(query, 2)
    assert rows.shape == (2, 2, 16, 8)
    assert torch.equal(of_heads(rows, 6, 5), query)
    assert not rows[:, :, 15:].any()
    assert most_queries(32, 128, 256) == 32
