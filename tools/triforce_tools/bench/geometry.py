"""The shapes of published models, and models of these shapes with random weights, on which times do not depend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from triforce_core.config import Settings
from triforce_core.errors import InvalidValueError
from triforce_core.machine.device import DTYPES, torch_device
from triforce_core.models.files import load_config
from triforce_core.models.load import ATTENTION, check_attention

DRAFTER = "llama-68m"
SHAPES: dict[str, dict[str, Any]] = {
    "llama2-7b-128k": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "llama-3.1-8b": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    DRAFTER: {
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """The configurations of a target and a drafter with the same vocabulary size."""

    target: PretrainedConfig
    drafter: PretrainedConfig


def geometry_of(target: str, drafter: str = DRAFTER) -> Geometry:
    """The geometry of two models, each named by a key of `SHAPES`, the path of a config.json, or a directory with one.
    The drafter gets the target's vocabulary size. Raises `InvalidValueError` for other names.
    """
    shape = shape_of(target, "geometry")
    small = shape_of(drafter, "drafter-geometry")
    small.vocab_size = shape.vocab_size
    return Geometry(shape, small)


def shape_of(name: str, field: str) -> PretrainedConfig:
    if name in SHAPES:
        return LlamaConfig(**SHAPES[name], tie_word_embeddings=False, initializer_range=0.02)
    path = Path(name).expanduser()
    if not path.exists():
        rule = f"is neither one of {', '.join(SHAPES)} nor a config.json or a directory with one"
        raise InvalidValueError(field, name, rule)
    directory = path.parent if path.name == "config.json" else path
    return load_config(str(directory.absolute()), field)


def random_model(config: PretrainedConfig, settings: Settings, seed: int = 0) -> PreTrainedModel:
    """An untrained model on the settings' device and in their dtype. Its weights are normally distributed with the
    standard deviation `initializer_range` of the configuration, which is 0.02 for the models in `SHAPES`.
    """
    device = torch_device(settings.device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[settings.dtype], attn_implementation=ATTENTION, trust_remote_code=False
        )
    model.eval().requires_grad_(False)
    check_attention(model, config.model_type)
    return model  # type: ignore[no-any-return]
