"""FlashAttention on the GPU against the reference in float32, on the same 16-bit numbers."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from tests.trees import any_parents, seen
from triforce_core.attention import KERNELS, ON_CUDA, Kernel, Scoring, has_flash_attn
from triforce_core.attention.chunk_sums import torch_chunk_sums, triton_chunk_sums
from triforce_core.attention.flash_decoding import triton_ranged
from triforce_core.attention.ranged import WorkItems, attend, cut, gathered, over_items
from triforce_core.attention.reference import blocked

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

INSTALLED = [name for name in ON_CUDA if name != "flash_attn" or has_flash_attn()]
OUTPUT, LSE = 2e-2, 5e-3  # absolute, for outputs of size about 1: bfloat16 has 8 bits


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def pool_of(kv_heads: int, slots: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.full((2, kv_heads, slots, head_dim), torch.nan, dtype=dtype, device="cuda")


@pytest.mark.parametrize("kernel", [KERNELS[name] for name in INSTALLED], ids=INSTALLED)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "kv_heads", "queries", "past"),
    [
        (torch.bfloat16, 128, 8, 1, 700),
        (torch.bfloat16, 64, 2, 9, 1030),
        (torch.float16, 96, 1, 300, 200),
        (torch.bfloat16, 256, 2, 64, 0),
        (torch.bfloat16, 128, 2, 2048, 5000),
    ],
)
def test_a_kernel_is_the_reference(
    kernel: Kernel, dtype: torch.dtype, head_dim: int, kv_heads: int, queries: int, past: int
) -> None:
    query = normal(8, queries, head_dim, seed=0, dtype=dtype)
    pool = pool_of(kv_heads, past + queries + 60, head_dim, dtype)
    view = pool[:, :, 30:-30]
    view.copy_(normal(*view.shape, seed=1, dtype=dtype))
    for causal in (False, True):
        part = kernel(query, view[0], view[1], head_dim**-0.5, causal)
        expected = blocked(query.float(), view[0].float(), view[1].float(), head_dim**-0.5, causal)
        assert part.output.dtype == dtype
        torch.testing.assert_close(part.output.float(), expected.output, atol=OUTPUT, rtol=0)
        torch.testing.assert_close(part.lse, expected.lse, atol=LSE, rtol=0)


@pytest.mark.parametrize("kernel", [KERNELS[name] for name in INSTALLED], ids=INSTALLED)
def test_one_query_over_128k_keys(kernel: Kernel) -> None:
    """With so many keys the library splits them by itself."""
    query, pool = normal(32, 1, 128, seed=2), normal(2, 8, 131_072, 128, seed=3)
    part = kernel(query, pool[0], pool[1], 128**-0.5, False)
    expected = blocked(query.float(), pool[0].float(), pool[1].float(), 128**-0.5, False)
    torch.testing.assert_close(part.output.float(), expected.output, atol=OUTPUT, rtol=0)
    torch.testing.assert_close(part.lse, expected.lse, atol=LSE, rtol=0)


@pytest.mark.parametrize(
    ("queries", "splits", "group", "head_dim"), [(1, 16, 1, 128), (5, 3, 4, 64), (17, 1, 4, 128), (9, 3, 1, 256)]
)
def test_ranges_that_are_tensors(queries: int, splits: int, group: int, head_dim: int) -> None:
    """The ranges are in any order, and some are empty. All else in the pool is NaN. The pass has tokens of its own,
    too.
    """
    kv_heads, longest = 2, 5000
    starts, lengths = [20_000, 5, 12_000, 0], [5000, 0, 4097, 1]
    pool = pool_of(kv_heads, 30_000, head_dim, torch.bfloat16)
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        pool[:, :, start : start + length] = normal(2, kv_heads, length, head_dim, seed=i)
    pieces = [p for start, length in zip(starts, lengths, strict=True) for p in cut([(start, start + length)], splits)]
    first, count = (torch.tensor(n, dtype=torch.int32, device="cuda") for n in zip(*pieces, strict=True))
    items = WorkItems(first, count, longest, splits)

    each = normal(len(pieces), queries * group, kv_heads, head_dim, seed=9)
    found = triton_ranged(each, pool[0], pool[1], head_dim**-0.5, items)
    expected = gathered(each.float(), pool[0].float(), pool[1].float(), head_dim**-0.5, items)
    torch.testing.assert_close(found.output.float(), expected.output, atol=OUTPUT, rtol=0)
    torch.testing.assert_close(found.lse, expected.lse, atol=LSE, rtol=0)

    tokens = len(starts) * queries
    query = normal(group * kv_heads, tokens, head_dim, seed=10)
    own = normal(2, kv_heads, tokens, head_dim, seed=11)
    of_trees = [any_parents(Random(i), min(i, queries)) for i in range(len(starts))]
    each_sees, scale = seen(queries, of_trees).cuda(), head_dim**-0.5
    merged = attend(triton_ranged, query, own[0], own[1], (pool[0], pool[1]), Scoring(scale), items, each_sees)
    in_full = pool[0].float(), pool[1].float()
    exact = attend(gathered, query.float(), *own.float(), in_full, Scoring(scale), items, each_sees)
    torch.testing.assert_close(merged.float(), exact, atol=OUTPUT, rtol=0)


def test_all_items_of_one_sequence_have_its_queries() -> None:
    """They come as one query, expanded, of which no item may be read beyond its end."""
    pool = normal(2, 8, 5000, 128, seed=5)
    starts, lengths = (
        torch.tensor(n, dtype=torch.int32, device="cuda") for n in zip(*cut([(7, 4900)], 8), strict=True)
    )
    items = WorkItems(starts, lengths, 5000, 8)
    query = normal(8, 1, 1, 5, 128, seed=6)
    found = over_items(triton_ranged, query, pool[0], pool[1], 128**-0.5, items)
    exact = over_items(gathered, query.float(), pool[0].float(), pool[1].float(), 128**-0.5, items)
    torch.testing.assert_close(found.output.float(), exact.output, atol=OUTPUT, rtol=0)
    torch.testing.assert_close(found.lse, exact.lse, atol=LSE, rtol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_triton_runs_on_the_tensors_device_whichever_is_current() -> None:
    some = torch.ones(1, 1, 1, 16, dtype=torch.bfloat16, device="cuda:1")
    numbers = torch.tensor([0, 1], dtype=torch.int32, device="cuda:1")
    part = triton_ranged(some, some[0], some[0], 1.0, WorkItems(numbers[:1], numbers[1:], 1, 1))
    assert part.output.eq(1).all()


@pytest.mark.parametrize(
    ("rows", "tokens", "chunk", "head_dim"), [(8, 20_003, 8, 128), (32, 5000, 16, 64), (5, 131, 128, 96)]
)
def test_sums_of_chunks(rows: int, tokens: int, chunk: int, head_dim: int) -> None:
    query, keys = normal(2, rows, head_dim, seed=7), normal(2, tokens, head_dim, seed=8)
    found = triton_chunk_sums(query, keys, head_dim**-0.5, chunk, tokens - 5, 6)
    exact = torch_chunk_sums(query.double(), keys.double(), head_dim**-0.5, chunk, tokens - 5, 6)
    torch.testing.assert_close(found, exact.float(), atol=LSE, rtol=0)


def test_float32_over_128k_keys_takes_bounded_memory() -> None:
    query, pool = normal(32, 512, 64, seed=4, dtype=torch.float32), normal(2, 8, 131_072, 64, seed=5)
    keys, values = pool.float()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    blocked(query, keys, values, 0.125, True)
    assert torch.cuda.max_memory_allocated() - before < 2**30, "whole, the scores are 8 GiB"
