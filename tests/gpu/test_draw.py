"""Tokens drawn on the GPU, as it stands and compiled, are those drawn on the CPU; and joined products on the GPU."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.random_models import random_pair
from triforce_core.config import load_settings
from triforce_core.messages import GREEDY, SamplingParams
from triforce_core.models.fuse import fused_noisiest
from triforce_core.models.join import join_projections
from triforce_core.sampling.draw import Draw, drawn, noisiest, perturbed_logits

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

VOCAB = 32_000
PARAMS = [GREEDY, SamplingParams(), SamplingParams(0.6), SamplingParams(0.6, top_p=0.9), SamplingParams(1.2, top_k=50)]


def draws_of(params: SamplingParams, rows: int) -> list[Draw]:
    return [Draw(params, 2**40 + 7, position) for position in range(rows)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rows", [1, 9])
def test_tokens_are_those_of_the_cpu(rows: int, *, fused: bool) -> None:
    device = torch.device("cuda", 0)
    how = fused_noisiest(load_settings(device="cuda:0", compile="on"), VOCAB, device) if fused else noisiest
    for seed, params in enumerate(PARAMS):
        logits = 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
        draws = draws_of(params, rows)
        with torch.inference_mode():
            assert drawn(logits.to(device), draws, how).tolist() == drawn(logits, draws).tolist()


def test_the_noise_is_that_of_the_cpu() -> None:
    """The noise is equal up to the last bits of its two logarithms."""
    logits, draws = torch.randn(5, VOCAB), draws_of(SamplingParams(), 5)
    found, expected = perturbed_logits(logits.cuda(), draws), perturbed_logits(logits, draws)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("count", [1, 5, 300])
def test_joined_products_are_those_of_the_single_layers(count: int) -> None:
    model = random_pair("qwen2").theirs.to("cuda", torch.bfloat16)
    joined, tokens = copy.deepcopy(model), torch.arange(count, device="cuda")[None] % 256
    join_projections(joined)
    with torch.inference_mode():
        found, expected = joined(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)
