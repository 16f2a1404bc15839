"""Every kernel against the textbook in float64, and the merge of parts against the whole."""

from __future__ import annotations

import itertools
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from triforce_core.attention import KERNELS, ON_CUDA, Kernel, merge

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}  # absolute, for outputs of size about 1
HEAD_DIM = 16

HERE = {name: kernel for name, kernel in KERNELS.items() if name not in ON_CUDA}
kernels = pytest.mark.parametrize("kernel", HERE.values(), ids=HERE)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def textbook(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """softmax(QKᵀ)V in float64, one head at a time, and the log-sum-exp of the scores."""
    outputs, lses = [], []
    group = len(query) // len(keys)
    for head, q in enumerate(query.double()):
        scores = q @ keys[head // group].double().T * scale
        if causal:
            past = scores.shape[1] - scores.shape[0]
            scores = scores.masked_fill(~torch.ones_like(scores).tril(past).bool(), -torch.inf)
        outputs.append(scores.softmax(-1) @ values[head // group].double())
        lses.append(scores.exp().sum(-1).log())
    return torch.stack(outputs), torch.stack(lses)


def pool_views(kv_heads: int, count: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values as the caches hand them over: strided views, surrounded by what must not be read."""
    pool = torch.full((2, kv_heads, count + 50, HEAD_DIM), torch.nan, dtype=dtype)
    view = pool[:, :, 23 : 23 + count]
    view.copy_(torch.randn(view.shape, generator=torch.Generator().manual_seed(seed)))
    return view[0], view[1]


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("count", [1, 700, 1030])
def test_one_bfloat16_query_may_be_passed_twice(monkeypatch: pytest.MonkeyPatch, slow: bool, count: int) -> None:
    """Some CPUs' operator is slow for one query. There the query is passed twice, and the second result is dropped."""
    module = import_module("triforce_core.attention.cpu_flash")
    monkeypatch.setattr(module, "one_query_is_slow", lambda: slow)
    query = torch.randn(4, 1, HEAD_DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    keys, values = pool_views(4, count, torch.bfloat16, seed=1)
    with CountingQueries() as counted:
        part = KERNELS["cpu_flash"](query, keys, values, 0.3, False)
    assert counted.queries == [1 + slow]
    output, lse = textbook(query, keys, values, 0.3, causal=False)
    assert (part.output.shape, part.lse.shape) == (output.shape, lse.shape)
    torch.testing.assert_close(part.output.double(), output, atol=TOLERANCE[torch.bfloat16], rtol=0)
    torch.testing.assert_close(part.lse.double(), lse, atol=1e-4, rtol=0)


class CountingQueries(TorchDispatchMode):
    """Counts the queries of each head in each call of the flash operator."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.queries.append(args[0].shape[2])
        return func(*args, **(kwargs or {}))


@kernels
@dtypes
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("queries", "count"), [(1, 1), (1, 700), (5, 3), (9, 1030), (64, 200)])
def test_a_range_of_keys(kernel: Kernel, dtype: torch.dtype, kv_heads: int, queries: int, count: int) -> None:
    query = 2 * torch.randn(4, queries, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys, values = pool_views(kv_heads, count, dtype, seed=1)
    part = kernel(query, keys, values, 0.3, False)
    output, lse = textbook(query, keys, values, 0.3, causal=False)
    assert part.output.dtype == dtype
    assert part.lse.dtype == torch.float32
    torch.testing.assert_close(part.output.double(), output, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(part.lse.double(), lse, atol=1e-4, rtol=0)


@kernels
@dtypes
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("past", [0, 1, 300])
@pytest.mark.parametrize("queries", [1, 2, 9, 32, 33, 150])
def test_past_and_own_tokens_causally(
    kernel: Kernel, dtype: torch.dtype, kv_heads: int, queries: int, past: int
) -> None:
    query = 2 * torch.randn(4, queries, HEAD_DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    keys, values = pool_views(kv_heads, past + queries, dtype, seed=3)
    part = kernel(query, keys, values, 0.3, True)
    output, lse = textbook(query, keys, values, 0.3, causal=True)
    torch.testing.assert_close(part.output.double(), output, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(part.lse.double(), lse, atol=1e-4, rtol=0)


@kernels
@pytest.mark.parametrize("past", [0, 4000, 5000])
def test_many_queries_over_many_keys(kernel: Kernel, past: int) -> None:
    """Kernels that work in blocks get more queries and more keys than a block has."""
    query = torch.randn(2, 600, HEAD_DIM, generator=torch.Generator().manual_seed(6))
    keys, values = pool_views(1, past + 600, torch.float32, seed=7)
    for causal in (False, True):
        part = kernel(query, keys, values, 0.3, causal)
        output, lse = textbook(query, keys, values, 0.3, causal)
        torch.testing.assert_close(part.output.double(), output, atol=1e-5, rtol=0)
        torch.testing.assert_close(part.lse.double(), lse, atol=1e-4, rtol=0)


@kernels
@dtypes
@pytest.mark.parametrize("cuts", [[], [100], [1, 2, 199], [50, 60, 120, 199]], ids=str)
def test_merged_ranges_equal_the_whole(kernel: Kernel, dtype: torch.dtype, cuts: list[int]) -> None:
    """Ranges of any size, one of which outweighs the others by e^40 for some queries."""
    query = torch.randn(4, 7, HEAD_DIM, generator=torch.Generator().manual_seed(4)).to(dtype)
    keys, values = pool_views(2, 200, dtype, seed=5)
    keys[0, 150] = 10 * query[0, 3]
    ranges = itertools.pairwise([0, *cuts, 200])
    parts = [kernel(query, keys[:, a:b], values[:, a:b], 0.3, False) for a, b in ranges]
    merged = merge(parts)
    assert merged.dtype == dtype
    output, _ = textbook(query, keys, values, 0.3, causal=False)
    torch.testing.assert_close(merged.double(), output, atol=TOLERANCE[dtype], rtol=0)
