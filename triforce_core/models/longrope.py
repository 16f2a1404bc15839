"""LongRoPE with the same frequencies for texts of all lengths. transformers takes one set up to the length of the first
training and another beyond it, so a text's keys would change while it grows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGROPE = "longrope"


def is_long(config: PretrainedConfig, longest: int | None) -> bool:
    """Whether contexts of up to `longest` tokens, by default of all positions, take the frequencies for long texts."""
    found = getattr(config, "rope_parameters", None) or {}
    length = longest or config.max_position_embeddings
    return bool(found.get("rope_type") == LONGROPE and length > found["original_max_position_embeddings"])


def fix_longrope(model: PreTrainedModel, longest: int | None) -> None:
    """Choose the frequencies for contexts of up to `longest` tokens, in place; nothing for RoPE of another type."""
    length = longest or model.config.max_position_embeddings
    for module in model.modules():
        if getattr(module, "rope_type", None) == LONGROPE:
            frequencies, _ = ROPE_INIT_FUNCTIONS[LONGROPE](model.config, model.device, seq_len=length)
            module.get_buffer("inv_freq").copy_(frequencies)
            module.rope_type = "default"  # type: ignore[assignment]  # so that transformers chooses no more
