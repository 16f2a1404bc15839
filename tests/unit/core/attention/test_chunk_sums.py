"""Log-sum-exps by chunk, against float64; the kernel in Triton's interpreter, which computes with NumPy.

pip install triton && TRITON_INTERPRET=1 python -m pytest tests/unit/core/attention/test_chunk_sums.py
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.unit.core.attention.test_flash_decoding import interpreted
from triforce_core.attention import chunk_sums as ours
from triforce_core.attention import chunk_sums_for
from triforce_core.config import Settings


class Shape(NamedTuple):
    kv_heads: int
    queries: int
    period: int
    head_dim: int
    tokens: int
    chunk: int
    seen: int  # keys that the first query sees


def drawn_shape(rng: random.Random) -> Shape:
    period, tokens = rng.randint(1, 16), rng.randint(1, 700)
    seen = rng.choice([tokens - period, rng.randint(-20, tokens + 200)])
    widths, chunks = [8, 16, 40, 64, 80, 96, 128], [1, 2, 4, 8, 16, 32, 64, 128]
    return Shape(
        rng.randint(1, 4), period * rng.randint(1, 8), period, rng.choice(widths), tokens, rng.choice(chunks), seen
    )


DRAW = random.Random(7)
SHAPES = [
    Shape(2, 8, 8, 64, 1000, 8, 993),  # the last query sees all keys, and the last chunk is whole
    Shape(1, 1, 1, 16, 5, 8, 5),  # one incomplete chunk
    Shape(2, 12, 4, 96, 259, 16, 250),  # grouped heads; a width that is no power of two; some see more than there is
    Shape(1, 80, 8, 32, 300, 4, 2),  # more queries than a tile has; most see nothing of most chunks
    Shape(1, 3, 3, 16, 130, 1, -1),  # chunks of one token; the first queries see nothing
    Shape(3, 8, 8, 128, 128, 128, 500),  # another piece follows, which they see too
    *(drawn_shape(DRAW) for _ in range(30)),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))


def expected(query: Tensor, keys: Tensor, scale: float, chunk: int, seen: int, period: int) -> Tensor:
    logits = (query.double() @ keys.double().mT) * scale
    last = seen + torch.arange(query.shape[1]) % period
    logits = logits.masked_fill(torch.arange(keys.shape[1]) >= last[:, None], -torch.inf)
    return torch.stack([some.logsumexp(-1) for some in logits.split(chunk, dim=-1)], dim=-1)


def drawn(shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries, and keys in the middle of a pool of which all else is NaN."""
    kv_heads, queries, _, head_dim, tokens, _, _ = shape
    pool = torch.full((kv_heads, tokens + 64, head_dim), torch.nan, dtype=dtype)
    pool[:, 32 : 32 + tokens] = torch.randn(kv_heads, tokens, head_dim, generator=torch.Generator().manual_seed(0))
    return torch.randn(kv_heads, queries, head_dim, dtype=dtype), pool[:, 32 : 32 + tokens]


@pytest.mark.parametrize("together", [1, 64, 1 << 20])
@each_shape
def test_with_operators(shape: Shape, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "MOST_LOGITS", {"cpu": together * shape.kv_heads * shape.queries})
    given = (*drawn(shape, torch.float32), 0.3, shape.chunk, shape.seen, shape.period)
    torch.testing.assert_close(ours.torch_chunk_sums(*given).double(), expected(*given), atol=1e-4, rtol=0)


@interpreted
@each_shape
def test_in_one_kernel(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sum is written."""
    empty = ours.results
    monkeypatch.setattr(ours, "results", lambda *given: empty(*given).fill_(torch.nan))
    given = (*drawn(shape, torch.float16), 0.3, shape.chunk, shape.seen, shape.period)
    torch.testing.assert_close(ours.triton_chunk_sums(*given).double(), expected(*given), atol=2e-3, rtol=0)


def test_chunks_that_divide_no_tile_are_summed_with_operators() -> None:
    given = (*drawn(Shape(2, 8, 8, 16, 40, 6, 33), torch.float32), 0.3, 6, 33, 8)
    assert torch.equal(ours.triton_chunk_sums(*given), ours.torch_chunk_sums(*given))


@pytest.mark.parametrize("runs", [True, False])
def test_the_kernel_runs_where_triton_does(runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triforce_core.attention.can_run", lambda device: runs)
    settings = Settings.model_validate({"device": "cuda", "dtype": "bfloat16"})
    assert chunk_sums_for(settings) is (ours.triton_chunk_sums if runs else ours.torch_chunk_sums)
    assert chunk_sums_for(Settings()) is ours.torch_chunk_sums
