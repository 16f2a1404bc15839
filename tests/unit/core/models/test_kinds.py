"""Kinds of models beside the families of random_models.py: what is served is what transformers gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    NemotronConfig,
    NemotronForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    StableLmConfig,
    StableLmForCausalLM,
)

from tests.compiling import needs_a_compiler
from tests.served import generated, served

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


@needs_a_compiler
@pytest.mark.parametrize("name", ["StableLM", "Nemotron"])
def test_compiled_kernels(name: str, tmp_path: Path) -> None:
    theirs = KINDS[name]()
    theirs.save_pretrained(tmp_path)
    assert served(str(tmp_path), compile="on") == generated(theirs)
