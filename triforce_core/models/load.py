"""Load a causal language model from transformers, unmodified, with attention going through our KV caches.

What a model needs and we do not honour is refused here, by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.configuration_utils import PretrainedConfig
from transformers.utils import logging as transformers_logging

from triforce_core.errors import UnknownModelError, UnsupportedModelError, require
from triforce_core.kv.base import Batch, KVGeometry

ATTENTION = "triforce"
DEMO_WEIGHTS = Path(__file__).parent.parent / "demo" / "weights"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SUPPORTED_ROPE = {"default", "linear", "llama3", "yarn"}  # their frequencies do not depend on the current length
UNSUPPORTED_KEYWORDS = ("sliding_window", "softcap", "s_aux", "position_bias")  # what models may ask of attention


def attention_through_kv(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    kv: Batch,
    **asked: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in place of its own attention: query [1, heads, tokens, head_dim], key and value alike.

    Returns [1, tokens, heads, head_dim]. The keys come rotated to the positions that the batch gave.
    """
    for keyword in UNSUPPORTED_KEYWORDS:
        if asked.get(keyword) is not None:
            raise UnsupportedModelError(f"attention with {keyword} is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    return kv.cache.attend(layer, query[0], key[0], value[0], scale, kv).unsqueeze(0), None


AttentionInterface.register(ATTENTION, attention_through_kv)


def resolve(name: str, role: str) -> str:
    """`demo` names the embedded pair; anything else is a directory or, failing that, a hub id for transformers.

    `role` is `target` or `drafter`, and the field that an error names.
    """
    if name == "demo":
        return str(DEMO_WEIGHTS / role)
    path = Path(name).expanduser()
    if path.exists() or name.startswith(("/", ".", "~")):
        if not (path / "config.json").is_file():
            raise UnknownModelError(role, name, "is not a directory with a config.json")
        return str(path)
    return name


def load_config(name: str, role: str) -> PretrainedConfig:
    """The model's configuration, checked for what this engine supports."""
    path = resolve(name, role)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UnknownModelError(
            role, name, f"is neither a model directory nor a hub id that loads ({reason})"
        ) from None
    check_supported(config, name)
    return config  # type: ignore[no-any-return]


def check_supported(config: PretrainedConfig, name: str) -> None:
    """Raise `UnsupportedModelError` for a feature that would make the output differ from the model's own."""

    def refuse(feature: str, value: object) -> None:
        raise UnsupportedModelError(f"model {name!r}: {feature} = {value!r} is not supported")

    if getattr(config, "is_encoder_decoder", False):
        refuse("is_encoder_decoder", True)
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        refuse("sliding_window", window)
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    if kinds:
        refuse("layer_types", sorted(kinds))
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in SUPPORTED_ROPE:
        refuse("rope_type", kind)
    for feature in ("attn_logit_softcapping", "attention_chunk_size", "kv_lora_rank", "sinks"):
        if getattr(config, feature, None):
            refuse(feature, getattr(config, feature))


def load_model(name: str, role: str, dtype: str, device: str) -> PreTrainedModel:
    """Weights in `dtype` on `device`, in inference mode. Safetensors only, no remote code."""
    require(dtype in DTYPES, "dtype", dtype, f"must be one of {', '.join(DTYPES)}")
    load_config(name, role)
    transformers_logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            resolve(name, role),
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UnknownModelError(role, name, f"holds no weights that load ({reason})") from None
    except KeyError as error:  # an architecture with attention classes of its own looks ours up among them
        raise UnsupportedModelError(f"model {name!r}: its attention cannot be replaced ({error})") from None
    model.to(device).eval()
    check_attention(model, name)
    return model  # type: ignore[no-any-return]


class FirstToken:
    """Stands for a batch and its cache in a pass over one token, which attends to itself alone."""

    def __init__(self) -> None:
        self.cache = self
        self.layers: list[int] = []

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, batch: Batch) -> Tensor:
        self.layers.append(layer)
        return values.repeat_interleave(query.shape[0] // values.shape[0], 0).transpose(0, 1)


@torch.inference_mode()
def check_attention(model: PreTrainedModel, name: str) -> None:
    """Raise `UnsupportedModelError` unless each layer attends through our seam and asks nothing more of it.

    What the configuration does not show (learned sinks, attention of the model's own) shows in a pass over one token.
    """
    first = FirstToken()
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        model(input_ids=token, position_ids=token, use_cache=False, kv=first)
    except (UnsupportedModelError, TypeError) as error:
        raise UnsupportedModelError(f"model {name!r}: {error}") from None
    if first.layers != list(range(model.config.num_hidden_layers)):
        raise UnsupportedModelError(f"model {name!r}: not all layers use attention that can be replaced")


def kv_geometry(model: PreTrainedModel) -> KVGeometry:
    """The shape of the model's KV, from its configuration."""
    config = model.config
    heads = config.num_attention_heads
    return KVGeometry(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
        device=model.device,
    )


def context_length(config: PretrainedConfig) -> int:
    """The most tokens, prompt and output together, that the model's positions allow."""
    return int(config.max_position_embeddings)


def load_tokenizer(name: str) -> Any:
    """The target's tokenizer, as transformers loads it."""
    return AutoTokenizer.from_pretrained(resolve(name, "target"), trust_remote_code=False)


def stop_token_ids(name: str) -> tuple[int, ...]:
    """The target's end-of-sequence ids, from its generation config where there is one, else from its configuration."""
    try:
        found = GenerationConfig.from_pretrained(resolve(name, "target")).eos_token_id
    except OSError:
        found = None
    found = load_config(name, "target").eos_token_id if found is None else found
    return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)


def check_pair(target: str, drafter: str) -> None:
    """Refuse a pair that cannot work, before any weights are loaded: tiers exchange token ids.

    Where the drafter brings a tokenizer, it must be the target's; where it brings none, the sizes must agree.
    """
    configs = load_config(target, "target"), load_config(drafter, "drafter")
    sizes = [config.vocab_size for config in configs]
    require(sizes[0] == sizes[1], "drafter", drafter, f"has {sizes[1]} tokens: must have the target's {sizes[0]}")
    try:
        theirs = AutoTokenizer.from_pretrained(resolve(drafter, "drafter"), trust_remote_code=False).get_vocab()
    except (OSError, ValueError, KeyError):
        return
    same = theirs == load_tokenizer(target).get_vocab()
    require(same, "drafter", drafter, f"has a vocabulary other than that of the target {target!r}")


def check_same_vocabulary(target: PretrainedConfig, drafter: PretrainedConfig) -> None:
    """The part of `check_pair` that loaded models allow."""
    rule = f"must be the target's, {target.vocab_size}"
    require(drafter.vocab_size == target.vocab_size, "drafter.vocab_size", drafter.vocab_size, rule)
