"""Kinds of models beside the families of random_models.py: what is served is what transformers gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    NemotronConfig,
    NemotronForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    StableLmConfig,
    StableLmForCausalLM,
)

from tests.compiling import needs_a_compiler
from tests.served import OUTPUT, generated, served
from triforce_core.building.fingerprint import target_fingerprint
from triforce_core.config import load_settings

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def random(make: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(config).eval()


KINDS: dict[str, Callable[[], PreTrainedModel]] = {
    "StableLM": lambda: random(StableLmForCausalLM, StableLmConfig(**SMALL)),
    "StableLM 2": lambda: random(
        StableLmForCausalLM,
        StableLmConfig(**SMALL, use_qkv_bias=True, qk_layernorm=True, use_parallel_residual=True),
    ),
    "Nemotron": lambda: random(NemotronForCausalLM, NemotronConfig(**SMALL)),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_tokens_that_transformers_gives(name: str, tmp_path: Path) -> None:
    theirs = KINDS[name]()
    theirs.save_pretrained(tmp_path)
    assert served(str(tmp_path)) == generated(theirs)


def phi3(short: float = 1.0, long: float = 4.0) -> PreTrainedModel:
    """The first training was up to 128 tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [short] * 6,
        "long_factor": [long] * 6,
        "original_max_position_embeddings": 128,
        "partial_rotary_factor": 0.75,
    }
    config = Phi3Config(**SMALL, rope_parameters=rope, original_max_position_embeddings=128)
    return random(Phi3ForCausalLM, config)


@pytest.mark.parametrize("length", [64, 90, 400])
@pytest.mark.parametrize("longest", [128, 129, None])
def test_longrope_is_chosen_by_the_context_length_alone(longest: int | None, length: int, tmp_path: Path) -> None:
    phi3().save_pretrained(tmp_path)
    if longest and length + OUTPUT > longest:
        return  # no request is so long
    fixed = phi3(1.0, 1.0) if longest == 128 else phi3(4.0, 4.0)
    ours = served(str(tmp_path), length=length, context_length=longest)
    assert ours == generated(fixed, length=length)
    if (length > 128) == (longest != 128):
        assert ours == generated(phi3(), length=length), "transformers chooses the same for a text of this length"


def test_a_fingerprint_tells_the_choice(tmp_path: Path) -> None:
    phi3().save_pretrained(tmp_path)
    long, longer, short = (
        target_fingerprint(load_settings(None, target={"model": str(tmp_path), "context_length": longest}))
        for longest in (129, 200, 128)
    )
    assert long == longer != short


@needs_a_compiler
@pytest.mark.parametrize("name", ["StableLM", "Nemotron"])
def test_compiled_kernels(name: str, tmp_path: Path) -> None:
    theirs = KINDS[name]()
    theirs.save_pretrained(tmp_path)
    assert served(str(tmp_path), compile="on") == generated(theirs)
