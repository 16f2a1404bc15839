"""Tiny models of the families of causal language models that transformers has, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

# What families call the same sizes; each gets those that its configuration has.
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 128,
    "n_inner": 128,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "n_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "n_positions": 8192,
    "max_seq_len": 8192,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "initializer_range": 0.15,
    "sliding_window": 24,
    "tie_word_embeddings": False,
}
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def tiny_config(kind: str, **special: Any) -> PretrainedConfig:
    """Two layers of a model of this `model_type`; `special` goes into its configuration besides."""
    known = AutoConfig.for_model(kind)
    fixed = {name for name in SIZES if isinstance(getattr(type(known), name, None), property)}
    sizes = {name: value for name, value in SIZES.items() if hasattr(known, name) and name not in fixed}
    return AutoConfig.for_model(kind, **(sizes | NO_TOKENS | special))


def tiny_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model.eval()
