"""The language model within a checkpoint of text and images, which is served for text alone.

For text the positions of Qwen's M-RoPE are equal in all its sections, so it is plain RoPE.
"""

import re
from typing import Any

from transformers import AutoConfig
from transformers.configuration_utils import PretrainedConfig

WHOLES = ("gemma3", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")  # kinds of such checkpoints
# Kinds of their language models that have no class of their own for text, and what they are then.
KINDS = {"qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
# How such checkpoints name the language model's weights, and how a checkpoint of text alone does.
NAMES = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}
OTHERS = re.compile(r"(model\.)?(vision_tower|visual|multi_modal_projector)\.")


def text_part(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the language model within; the same one if it is not such a checkpoint's."""
    if config.model_type not in WHOLES:
        return config
    text = config.get_text_config()
    said: dict[str, Any] = text.to_dict()
    kind = KINDS.get(said.pop("model_type"), text.model_type)
    if rope := said.get("rope_parameters"):
        rope.pop("mrope_section", None)
    for field in ("eos_token_id", "tie_word_embeddings", "quantization_config"):  # said of the whole
        if getattr(config, field, None) is not None:
            said[field] = getattr(config, field)
    return AutoConfig.for_model(kind, **said)


def is_of_another_part(weight: str) -> bool:
    """Whether a weight of this name is part of what reads images."""
    return OTHERS.match(weight) is not None
