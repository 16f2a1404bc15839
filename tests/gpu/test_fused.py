"""Fused kernels on the GPU: the logits of ordinary ones, and, captured, the tokens of plain decoding."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from tests.exactness.cases import Outcome, finish
from tests.random_models import random_pair, random_tokens, with_noise
from tests.stating import spec
from triforce_core.attention import kernel_for
from triforce_core.building.assembly import local_engine
from triforce_core.building.inspection import runners_of
from triforce_core.config import Settings
from triforce_core.engine.sequence import Request
from triforce_core.kv.base import Forward
from triforce_core.kv.streaming import StreamingKV, WindowSettings
from triforce_core.messages import SamplingParams, Span
from triforce_core.models.fuse import fuse, is_fused
from triforce_core.models.load import kv_geometry
from triforce_core.models.runner import ModelRunner

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


def logits_of(model: PreTrainedModel, settings: Settings, length: int) -> torch.Tensor:
    """The logits of all tokens of a text of this length, from one pass."""
    geometry = kv_geometry(model)
    kv = StreamingKV(geometry, 1, WindowSettings(4, 200, 40), kernel_for(settings, geometry.head_dim))
    span = Span(1, 0, random_tokens(length, seed=length), spec(length))
    logits, _ = ModelRunner(model, kv).forward([Forward(span, length)])
    return logits


@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("qwen3", "float16"), ("qwen2", "float32")])
def test_logits_are_as_near_to_exact_ones_as_without(family: str, dtype: str) -> None:
    """In 16 bits fused kernels round less often. Their error may be at most twice that of ordinary kernels."""
    exact = random_pair(family).ours.to("cuda")
    settings = Settings.model_validate({"device": "cuda", "dtype": dtype, "compile": "on"})
    plain = copy.deepcopy(exact).to(getattr(torch, dtype))
    fused = copy.deepcopy(plain)
    assert fuse(fused, settings)
    for length in (1, 2, 9, 130):
        expected = logits_of(exact, Settings.model_validate({"device": "cuda", "dtype": "float32"}), length)
        error = (logits_of(plain, settings, length) - expected).abs().max().item()
        found = (logits_of(fused, settings, length) - expected).abs().max().item()
        assert found <= 2 * error + 1e-4


def decoded(dtype: str, lookaheads: tuple[int, int], temperature: float, compile: str) -> Outcome:
    """Decode more requests than there is room for, of all lengths, through tiers whose passes are captured."""
    target = random_pair(num_attention_heads=8, num_key_value_heads=2).ours.to("cuda", getattr(torch, dtype))
    settings = Settings.model_validate(
        {
            "device": "cuda",
            "dtype": dtype,
            "max_sequences": 3,
            "graphs": "on",
            "compile": compile,
            "retrieval": {"budget": 512, "refresh_every": 16},
            "draft": {"window": 60},
            "target": {"kv_pool_tokens": 16_384},
        }
    )
    engine = local_engine(target, with_noise(target, 0.1), settings)
    for runner in runners_of(engine).values():
        assert is_fused(runner.model) == (compile == "on")
    sampling = SamplingParams(temperature)
    requests = [
        Request(random_tokens(3 + 307 * (i % 4), seed=i), 20 + 25 * (i % 4), sampling, seed=i, lookaheads=lookaheads)
        for i in range(9)
    ]
    return finish(engine, requests)


@pytest.mark.timeout(300)  # three times it compiles
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_captured_they_give_the_tokens_of_plain_decoding(temperature: float) -> None:
    found = decoded("float32", (8, 3), temperature, "on")
    assert found.tokens == decoded("float32", (0, 0), temperature, "on").tokens
    assert found.tokens == decoded("float32", (8, 3), temperature, "off").tokens
    assert sum(levels[0].accepted for levels in found.tallies) > 50


@pytest.mark.timeout(300)
def test_in_16_bits_they_run_captured() -> None:
    """In 16 bits, passes of different widths may differ in their tokens. That proposals are accepted shows that the
    passes are sane.
    """
    found = decoded("bfloat16", (8, 3), 0.0, "on")
    assert sum(levels[0].accepted for levels in found.tallies) > 50
