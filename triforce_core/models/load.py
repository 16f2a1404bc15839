"""Load a causal language model from transformers, unmodified, with attention going through our KV caches.

Models with features that this engine does not support are refused, naming the feature.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from triforce_core.errors import InvalidValueError, UnknownModelError, UnsupportedModelError, require
from triforce_core.kv.base import Batch, KVGeometry
from triforce_core.models.device import DTYPES, check_dtype, torch_device
from triforce_core.models.fallback import out_of_memory, reason_of
from triforce_core.models.files import (
    check_pair,
    check_quantization,
    check_ranks,
    check_same_vocabulary,
    check_self_drafter,
    check_supported,
    context_length,
    kv_shape,
    load_config,
    load_tokenizer,
    resolve,
    stop_token_ids,
)
from triforce_core.models.rank_group import Group

__all__ = [
    "ATTENTION",
    "DTYPES",
    "check_attention",
    "check_pair",
    "check_quantization",
    "check_ranks",
    "check_same_vocabulary",
    "check_self_drafter",
    "check_supported",
    "context_length",
    "kv_geometry",
    "kv_shape",
    "load_config",
    "load_model",
    "load_tokenizer",
    "resolve",
    "stop_token_ids",
]

ATTENTION = "triforce"
UNSUPPORTED_KEYWORDS = ("sliding_window", "softcap", "s_aux", "position_bias")  # arguments that models may pass


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
    """The attention function that transformers calls in place of its own: query [1, heads, tokens, head_dim], key and
    value [1, kv_heads, tokens, head_dim].

    Returns [1, tokens, heads, head_dim]. Queries and keys are already rotated to the positions of the batch.
    """
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise UnsupportedModelError("attention that is not plainly causal is not supported")
    for keyword in UNSUPPORTED_KEYWORDS:
        if asked.get(keyword) is not None:
            raise UnsupportedModelError(f"attention with {keyword} is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    return kv.cache.attend(layer, query[0], key[0], value[0], scale, kv).unsqueeze(0), None


AttentionInterface.register(ATTENTION, attention_through_kv)


def load_model(name: str, role: str, dtype: str, device: str, group: Group | None = None) -> PreTrainedModel:
    """The model with weights in `dtype` on `device`, in evaluation mode. Safetensors only, no remote code.

    With a group, this rank's share of the model, by transformers' own tensor-parallel plan; all ranks must load it at
    the same time.
    """
    require(dtype in DTYPES, "dtype", dtype, f"must be one of {', '.join(DTYPES)}")
    where = torch_device(device)
    check_dtype(dtype, where)
    config = load_config(name, role)
    if group is not None:
        check_ranks(config, name, group.world, "tensor_parallel")
    transformers_logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            resolve(name, role),
            dtype=DTYPES[dtype],
            attn_implementation=ATTENTION,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            distributed_config=group and DistributedConfig(tp_size=group.world, tp_plan="auto"),
        )
    except (OSError, ValueError, RuntimeError, MemoryError, SafetensorError) as error:
        if out_of_memory(error):
            raise too_large(role, name, error) from None
        reason = str(error).strip().split("\n")[0]
        raise UnknownModelError(role, name, f"holds no weights that load ({reason})") from None
    except KeyError as error:  # the architecture looks up our attention among its own classes
        raise UnsupportedModelError(f"model {name!r}: its attention cannot be replaced ({error})") from None
    model, info = loaded
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:
        raise UnknownModelError(role, name, f"lacks weights or holds them in other shapes: {', '.join(absent[:3])}")
    try:
        model.to(where).eval()
    except RuntimeError as error:
        if out_of_memory(error):
            raise too_large(role, name, error) from None
        raise
    if group is not None:
        group.barrier()  # ranks may load at different speeds, but passes have a deadline
    check_attention(model, name)
    return model  # type: ignore[no-any-return]


def too_large(role: str, name: str, error: Exception) -> InvalidValueError:
    return InvalidValueError(role, name, f"takes more memory than there is ({reason_of(error)})")


class FirstToken:
    """A stand-in for a batch and its cache in a pass over one token, which attends to itself alone."""

    def __init__(self, geometry: KVGeometry) -> None:
        self.cache = self
        self.shape = (geometry.num_kv_heads, 1, geometry.head_dim)
        self.layers: list[int] = []

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float, batch: Batch) -> Tensor:
        self.layers.append(layer)
        if keys.shape != self.shape or values.shape != self.shape:
            raise UnsupportedModelError(f"KV of shape {tuple(keys.shape)} where its configuration says {self.shape}")
        return values.repeat_interleave(query.shape[0] // values.shape[0], 0).transpose(0, 1)


@torch.inference_mode()
def check_attention(model: PreTrainedModel, name: str) -> None:
    """Raise `UnsupportedModelError` unless each layer calls our attention, and with supported arguments only.

    A pass over one token reveals features that the configuration does not (learned sinks, custom attention code).
    """
    first = FirstToken(kv_geometry(model))
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        model(input_ids=token, position_ids=token, use_cache=False, kv=first)
    except Exception as error:  # the code of any architecture may run here
        raise UnsupportedModelError(f"model {name!r}: {error}") from None
    if first.layers != list(range(model.config.num_hidden_layers)):
        raise UnsupportedModelError(f"model {name!r}: not all layers use attention that can be replaced")


def kv_geometry(model: PreTrainedModel) -> KVGeometry:
    """The shape of the model's KV, from its configuration; that of this rank's share if the model is divided."""
    layers, kv_heads, head_dim = kv_shape(model.config)
    return KVGeometry(layers, kv_heads // (model.tp_size or 1), head_dim, model.dtype, model.device)
