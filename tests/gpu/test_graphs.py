"""Captured passes on the GPU propose what eager passes propose, and in float32 what ordinary passes do."""

from __future__ import annotations

import pytest
import torch

from tests.exactness.cases import Outcome, finish
from tests.random_models import random_pair, random_tokens, with_noise
from triforce_core.building.assembly import local_engine
from triforce_core.building.inspection import runners_of
from triforce_core.config import Settings
from triforce_core.engine.sequence import Request
from triforce_core.messages import SamplingParams, Tier
from triforce_core.models.graphs import CapturedPass

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


def decoded(dtype: str, graphs: str, temperature: float) -> Outcome:
    """Decode more requests than there is room for, of all lengths, through three tiers on the GPU."""
    target = random_pair(num_attention_heads=8, num_key_value_heads=2).ours.to("cuda", getattr(torch, dtype))
    settings = Settings.model_validate(
        {
            "device": "cuda",
            "dtype": dtype,
            "max_sequences": 3,
            "graphs": graphs,
            "compile": "off",  # each engine would compile anew
            "retrieval": {"budget": 512, "refresh_every": 16},
            "draft": {"window": 60},
            "target": {"kv_pool_tokens": 16_384},
        }
    )
    engine = local_engine(target, with_noise(target, 0.2), settings)
    for tier, runner in runners_of(engine).items():
        captured = runner.shaped is not None and any(isinstance(p, CapturedPass) for p in runner.shaped.passes)
        assert captured == (graphs == "on" and (tier != Tier.TARGET or dtype != "float32"))
    requests = [
        Request(
            random_tokens(3 + 307 * (i % 4), seed=i),
            max_tokens=20 + 25 * (i % 4),
            sampling=SamplingParams(temperature),
            seed=i,
            lookaheads=[(8, 3), (4, 1), (3, 0)][i % 3],
        )
        for i in range(9)
    ]
    return finish(engine, requests)


@pytest.mark.parametrize(("dtype", "temperature"), [("float32", 1.0), ("bfloat16", 0.0), ("bfloat16", 1.0)])
def test_a_graph_does_what_its_eager_pass_does(dtype: str, temperature: float) -> None:
    graphs, eager = (decoded(dtype, mode, temperature) for mode in ("on", "eager"))
    assert graphs.tokens == eager.tokens
    assert graphs.tallies == eager.tallies


@pytest.mark.parametrize("temperature", [1.0])
def test_in_float32_both_do_what_ordinary_passes_do(temperature: float) -> None:
    graphs, ordinary = (decoded("float32", mode, temperature) for mode in ("on", "off"))
    assert graphs.tokens == ordinary.tokens
    assert graphs.tallies == ordinary.tallies
