"""KV in 8 bits on a GPU: rounded as on the CPU, seen as rounded by every kernel, and the same wherever it lies."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from tests.exactness.cases import finish
from tests.exactness.test_rounded_kv import assert_greedy
from tests.random_models import random_model, random_tokens, with_noise
from triforce_core.attention import KERNELS, rounded, widening
from triforce_core.attention.rounded import KEYS
from triforce_core.config import load_settings
from triforce_core.engine.assembly import local_engine
from triforce_core.engine.sequence import Request
from triforce_core.messages import GREEDY
from triforce_core.models.load import ATTENTION

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MISSING = [] if find_spec("flash_attn") else ["flash_attn"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_rounded_as_on_the_cpu(dtype: torch.dtype) -> None:
    normal = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    numbers = torch.cat([normal * 10 ** torch.linspace(-4, 4, len(normal)), torch.tensor([torch.inf, -torch.inf])])
    numbers = numbers.to(dtype)
    there = rounded(numbers.cuda()).cpu()
    assert torch.equal(there.view(torch.uint8), rounded(numbers).view(torch.uint8))
    assert there.float().isfinite().all()
    assert torch.equal(rounded(numbers.cuda()).to(dtype).cpu(), there.to(dtype)), "and widened"


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in ("cpu_flash", *MISSING)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "count"), [(1, 1), (9, 700), (7, KEYS + 7), (300, 3 * KEYS + 1)])
def test_kernels_see_what_the_bits_stand_for(name: str, causal: bool, queries: int, count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(8, queries, 64, generator=generator).to("cuda", torch.bfloat16)
    pool = rounded(torch.randn(2, 2, count + 20, 64, generator=generator).cuda())
    keys, values = pool[:, :, 10 : 10 + count]
    part = widening(KERNELS[name])(query, keys, values, 0.125, causal)
    expected = KERNELS["reference"](query.float(), keys.float(), values.float(), 0.125, causal)
    torch.testing.assert_close(part.output.float(), expected.output, atol=2e-2, rtol=0)
    torch.testing.assert_close(part.lse, expected.lse, atol=5e-3, rtol=0)


@pytest.mark.parametrize("offload", ["none", "host"])
@pytest.mark.parametrize("lookaheads", [(0, 0), (8, 3)], ids=str)
def test_tokens_are_those_of_the_model_that_sees_rounded_kv(offload: str, lookaheads: tuple[int, int]) -> None:
    """In float32, save for ties: tests/exactness says why."""
    model = random_model(num_hidden_layers=4)
    model.set_attn_implementation(ATTENTION)
    settings = load_settings(
        device="cuda",
        dtype="float32",
        compile="off",  # the definition runs the same model
        target={"kv_dtype": "float8_e4m3fn", "kv_pool_tokens": 2000, "offload": offload, "prefill_chunk": 64},
        retrieval={"budget": 128, "recent": 32, "refresh_every": 24},
    )
    drafter = with_noise(model, 0.05).to("cuda")
    engine = local_engine(model.to("cuda"), drafter, settings)
    requests = [Request(random_tokens(n, seed=n), 60, GREEDY, 0, lookaheads) for n in (700, 90, 300)]
    for request, tokens in zip(requests, finish(engine, requests).tokens, strict=True):
        assert_greedy(model, request.prompt, tokens)
