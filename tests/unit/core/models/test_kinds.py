"""Kinds of models beside the families of random_models.py: what is served is what transformers gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    NemotronConfig,
    NemotronForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    StableLmConfig,
    StableLmForCausalLM,
)

from tests.compiling import needs_a_compiler
from tests.served import OUTPUT, generated, served
from triforce_core.building.fingerprint import target_fingerprint
from triforce_core.config import load_settings
from triforce_core.errors import UnsupportedModelError
from triforce_core.models.files import load_config, stop_token_ids

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


EYES = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
QWEN_EYES = {"depth": 1, "num_heads": 2, "out_hidden_size": 64}
SMALL_EYES = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
TEXT = SMALL | {"head_dim": 16}
M_ROPE = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}


def mistral3(kind: str, *, tie: bool) -> PreTrainedModel:
    text = TEXT | {"model_type": kind, "sliding_window": None, "tie_word_embeddings": tie}
    eyes = {"model_type": "pixtral", **EYES, **SMALL_EYES}
    config = Mistral3Config(text_config=text, vision_config=eyes, image_token_index=5, tie_word_embeddings=tie)
    return random(Mistral3ForConditionalGeneration, config)


def qwen_vl(make: Any, config: Any, *, tie: bool = False, **eyes: Any) -> PreTrainedModel:
    tokens = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7}
    parts = {"text_config": M_ROPE | {"tie_word_embeddings": tie}, "vision_config": {**QWEN_EYES, **eyes}}
    return random(make, config(**parts, **tokens, tie_word_embeddings=tie))


def gemma3() -> PreTrainedModel:
    text = TEXT | {"sliding_window": 30, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma3Config(text_config=text, vision_config=EYES | SMALL_EYES, image_token_index=5)
    return random(Gemma3ForConditionalGeneration, config)


EYES_OF_2 = {"embed_dim": 32, "hidden_size": 64}
EYES_OF_3 = {"hidden_size": 32, "intermediate_size": 32, "deepstack_visual_indexes": [0]}
WHOLES: dict[str, Callable[[], PreTrainedModel]] = {
    "Mistral Small 3": lambda: mistral3("mistral", tie=False),
    "Mistral Small 3, one table": lambda: mistral3("mistral", tie=True),
    "Ministral 3": lambda: mistral3("ministral3", tie=False),
    "Qwen2-VL": lambda: qwen_vl(Qwen2VLForConditionalGeneration, Qwen2VLConfig, **EYES_OF_2),
    "Qwen2.5-VL": lambda: qwen_vl(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, hidden_size=32),
    "Qwen3-VL": lambda: qwen_vl(Qwen3VLForConditionalGeneration, Qwen3VLConfig, **EYES_OF_3),
    "Qwen3-VL, one table": lambda: qwen_vl(Qwen3VLForConditionalGeneration, Qwen3VLConfig, tie=True, **EYES_OF_3),
    "Gemma 3": gemma3,
}


@pytest.mark.parametrize("name", WHOLES)
def test_the_text_part_of_a_checkpoint_of_text_and_images(name: str, tmp_path: Path) -> None:
    theirs = WHOLES[name]()
    theirs.save_pretrained(tmp_path)
    assert served(str(tmp_path)) == generated(theirs)


def test_qwen_2_5_vl_as_published(tmp_path: Path) -> None:
    """With all fields of its text part at the top."""
    theirs = WHOLES["Qwen2.5-VL"]()
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    said = json.loads(file.read_text())
    text = {key: value for key, value in said.pop("text_config").items() if key not in said}
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 1e4}
    file.write_text(json.dumps(said | text | rope | {"rope_parameters": None}))
    assert served(str(tmp_path)) == generated(theirs)


def test_what_the_whole_says_holds_for_its_text_part(tmp_path: Path) -> None:
    whole = WHOLES["Qwen3-VL"]()
    whole.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    said = json.loads(file.read_text()) | {"eos_token_id": [3, 4], "quantization_config": {"quant_method": "gptq"}}
    file.write_text(json.dumps(said))
    with pytest.raises(UnsupportedModelError, match="quantization_config = 'gptq' is not supported"):
        load_config(str(tmp_path), "target")
    file.write_text(json.dumps({key: value for key, value in said.items() if key != "quantization_config"}))
    (tmp_path / "generation_config.json").unlink()
    assert stop_token_ids(str(tmp_path)) == (3, 4)


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
