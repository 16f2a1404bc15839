"""Numbers in 8 bits are the nearest that there are, and a widening kernel is the kernel over what they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.unit.test_attention import TOLERANCE, dtypes, kernels, textbook
from triforce_core.attention import KERNELS, ROUNDED, Kernel, Partial, rounded, widening
from triforce_core.attention.rounded import KEYS

HEAD_DIM = 16


def finite_numbers() -> Tensor:
    """All that 8 bits stand for, ascending, from the definition: sign, 4 bits of exponent, 3 of mantissa."""
    magnitudes = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    magnitudes += [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
    del magnitudes[-1]  # this pattern is NaN
    return torch.tensor([-m for m in magnitudes[:0:-1]] + magnitudes, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_number_becomes_the_nearest(dtype: torch.dtype) -> None:
    """Of all sizes, and halfway between two: then the one whose last bit is 0."""
    all_there_are = finite_numbers()
    normal = torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sizes = 10 ** torch.linspace(-4, 2.6, len(normal), dtype=torch.float64)
    halfway = (all_there_are[1:] + all_there_are[:-1]) / 2
    numbers = torch.cat([normal * sizes, halfway, all_there_are]).to(dtype)
    found = rounded(numbers)
    assert found.dtype == ROUNDED
    distances = (numbers.double()[:, None] - all_there_are).abs()
    nearest = distances.min(1)
    assert torch.equal((numbers.double() - found.double()).abs(), nearest.values)
    ties = (distances == nearest.values[:, None]).sum(1) == 2
    assert ties.sum() >= len(halfway) - 10, "some are no number of the dtype"
    assert (found.view(torch.uint8)[ties] % 2 == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_is_too_large_becomes_the_largest(dtype: torch.dtype) -> None:
    beyond = torch.tensor([449.0, 464.0, 500.0, 60_000.0, torch.inf], dtype=dtype)
    assert rounded(beyond).float().eq(448).all()
    assert rounded(-beyond).float().eq(-448).all()
    assert rounded(torch.tensor([torch.nan], dtype=dtype)).float().isnan().all()


def rounded_views(kv_heads: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values as the full cache hands them over: strided views, surrounded by what must not be read."""
    pool = rounded(torch.full((2, kv_heads, count + 50, HEAD_DIM), torch.nan))
    view = pool[:, :, 23 : 23 + count]
    view.copy_(rounded(torch.randn(view.shape, generator=torch.Generator().manual_seed(seed))))
    return view[0], view[1]


@kernels
@dtypes
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "count"),
    [(1, 1), (7, 7), (9, 700), (3, KEYS), (1, KEYS + 1), (40, KEYS + 39), (40, KEYS + 40), (200, KEYS + 230)],
)
def test_a_widening_kernel_attends_to_what_the_bits_stand_for(
    kernel: Kernel, dtype: torch.dtype, causal: bool, queries: int, count: int
) -> None:
    query = 2 * torch.randn(4, queries, HEAD_DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    keys, values = rounded_views(2, count, seed=2)
    part = widening(kernel)(query, keys, values, 0.3, causal)
    output, lse = textbook(query, keys, values, 0.3, causal)
    assert part.output.dtype == dtype
    torch.testing.assert_close(part.output.double(), output, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(part.lse.double(), lse, atol=1e-4, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("count", [30, KEYS, KEYS + 29, KEYS + 30, 3 * KEYS + 1])
def test_few_keys_are_widened_at_a_time(causal: bool, count: int) -> None:
    calls: list[tuple[int, bool]] = []

    def recording(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
        assert keys.dtype == values.dtype == query.dtype
        calls.append((keys.shape[1], causal))
        return KERNELS["reference"](query, keys, values, scale, causal)

    keys, values = rounded_views(1, count, seed=3)
    widening(recording)(torch.randn(1, 30, HEAD_DIM), keys, values, 0.3, causal)
    assert sum(widened for widened, _ in calls) == count, "each once"
    assert max(widened for widened, _ in calls) < KEYS + (30 if causal else 1)
    assert [its_own for _, its_own in calls] == [False] * (len(calls) - 1) + [causal]
