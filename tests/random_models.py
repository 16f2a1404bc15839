"""Small models with random weights, each beside the same weights under transformers' own attention.

A larger initialisation than usual makes attention matter and keeps greedy decoding from repeating one token.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from triforce_core.models.load import ATTENTION

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
}

IN_WINDOW: dict[str, Any] = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# The first of their two layers has a window of 20 tokens; gpt-oss has learned sinks, too.
WINDOWED: dict[str, Any] = {
    "gpt_oss": (GptOssConfig, GptOssForCausalLM, IN_WINDOW | PLAIN_ROPE | EXPERTS),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, IN_WINDOW),
    "olmo3": (Olmo3Config, Olmo3ForCausalLM, IN_WINDOW),
    "cohere2": (Cohere2Config, Cohere2ForCausalLM, IN_WINDOW),
}


class Pair(NamedTuple):
    ours: PreTrainedModel  # attention goes through our caches
    theirs: PreTrainedModel  # the same weights with transformers' own attention


def random_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Two layers, four query heads on two KV heads, 64 wide, float32; `overrides` go into the configuration."""
    config_class, model_class, special = (FAMILIES | WINDOWED)[family]
    values = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = config_class(**(values | special | overrides))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class(config).eval()


def random_pair(family: str = "llama", *, seed: int = 0, **overrides: Any) -> Pair:
    theirs = random_model(family, seed=seed, **overrides)
    theirs.set_attn_implementation("eager")
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation(ATTENTION)
    return Pair(ours, theirs)


def with_noise(model: PreTrainedModel, scale: float, *, seed: int = 0) -> PreTrainedModel:
    """A drafter: a copy whose weight matrices moved by Gaussian noise of `scale` times their own spread."""
    noisy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in noisy.parameters():
            if weight.dim() == 2:
                noise = torch.randn(weight.shape, generator=generator).to(weight)
                weight.add_(scale * weight.std() * noise)
    return noisy


def random_tokens(count: int, *, seed: int, vocab: int = 256) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocab, (count,), generator=generator).tolist())


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, tokens: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    """One ordinary pass of transformers over all tokens, [tokens, vocab] float32; `mask` is added to the scores."""
    input_ids = torch.tensor([tokens])
    positions = torch.arange(len(tokens))[None]
    output = model(input_ids=input_ids, position_ids=positions, attention_mask=mask, use_cache=False)
    return output.logits[0].float()


def byte_model(folder: Path, *, eos: int | None = None, **overrides: Any) -> str:
    """Random weights over the 256 bytes: its text is full of characters of several tokens, broken and whole."""
    alphabet = {character: token for token, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(alphabet, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    random_model(eos_token_id=eos, **overrides).save_pretrained(folder)
    return str(folder)
