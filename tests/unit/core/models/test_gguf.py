"""GGUF files: what is served is what transformers gives for the same weights, and what cannot be is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from deploy.checks import CHECKS, parameters
from deploy.service import served_name
from tests.gguf_files import TEMPLATE, as_stored, write_gguf
from tests.random_models import random_model
from tests.served import generated, served
from triforce_core.building.fingerprint import target_fingerprint
from triforce_core.config import load_settings
from triforce_core.errors import UnknownModelError, UnsupportedModelError
from triforce_core.models.files import load_tokenizer, stop_token_ids
from triforce_core.models.load import load_model

Q8, Q4 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1


def experts() -> PreTrainedModel:
    config = random_model("qwen3").config.to_dict() | {"num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**config | {"model_type": "qwen3_moe", "moe_intermediate_size": 64, "norm_topk_prob": True})
    ).eval()


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


def llama3_factors(model: PreTrainedModel) -> np.ndarray:
    plain = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    return (plain / model.model.rotary_emb.inv_freq).numpy()


def scaling(kind: str, name: str, factor: float, **more: Any) -> dict[str, Any]:
    given = {"type": name, "factor": factor, **more}
    return {f"{kind}.rope.scaling.{field}": value for field, value in given.items()}


# The model, llama.cpp's name of its kind, how the file stores it, and what the file says besides.
MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str, GGMLQuantizationType, dict[str, Any]]] = {
    "Llama": (random_model, "llama", GGMLQuantizationType.F32, {}),
    "Llama in 8 bits": (random_model, "llama", Q8, {}),
    "Llama in 4 bits": (random_model, "llama", Q4, {}),
    "Llama, one table": (lambda: random_model(tie_word_embeddings=True), "llama", Q8, {}),
    "Mistral": (lambda: random_model("mistral"), "llama", Q8, {}),
    "Qwen2": (lambda: random_model("qwen2"), "qwen2", Q8, {}),
    "Qwen3": (lambda: random_model("qwen3"), "qwen3", Q8, {}),
    "Qwen3 of experts": (
        experts,
        "qwen3moe",
        Q8,
        {
            "qwen3moe.expert_count": 4,
            "qwen3moe.expert_used_count": 2,
            "qwen3moe.expert_feed_forward_length": 64,
        },
    ),
    "linear RoPE": (
        lambda: random_model(rope_parameters=LINEAR),
        "llama",
        Q8,
        scaling("llama", "linear", 2.0),
    ),
    "linear RoPE of old": (lambda: random_model(rope_parameters=LINEAR), "llama", Q8, {"llama.rope.scale_linear": 2.0}),
    "YaRN": (
        lambda: random_model("qwen2", rope_parameters=YARN),
        "qwen2",
        Q8,
        scaling("qwen2", "yarn", 4.0, original_context_length=64, finetuned=True),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_serves_the_tokens_that_transformers_gives(name: str, tmp_path: Path) -> None:
    make, kind, stored, extra = MODELS[name]
    theirs = make()
    file = write_gguf(tmp_path / "m.gguf", theirs, kind, stored, extra=extra)
    assert served(file) == generated(as_stored(theirs, stored))


def test_the_factors_of_llama_3_s_rope(tmp_path: Path) -> None:
    theirs = random_model(rope_parameters=LLAMA3)
    factors = llama3_factors(theirs)
    assert factors.max() > 7, "this RoPE is scaled"
    file = write_gguf(tmp_path / "m.gguf", theirs, "llama", tensors={"rope_freqs.weight": factors})
    assert served(file) == generated(theirs)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write_gguf(tmp_path / "mine.gguf", random_model(), "llama", Q8)


def test_everything_comes_from_the_file(file: str, caplog: pytest.LogCaptureFixture) -> None:
    """Files beside it may be another model's."""
    for other in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        Path(file).with_name(other).write_text("{}")
    assert stop_token_ids(file) == (7, 9)
    tokenizer = load_tokenizer(file)
    text = "größer – 12 <a>"
    assert tokenizer.encode(text, add_special_tokens=False) == [*text.encode()]
    assert tokenizer.decode([*text.encode()]) == text
    assert tokenizer.encode("cab", add_special_tokens=False) == [ord("c"), 255]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert (tokenizer.chat_template, chat) == (TEMPLATE, "<user>hi")
    with caplog.at_level(logging.INFO, "triforce_core"):
        assert load_model(file, "target", "bfloat16", "cpu").dtype is torch.bfloat16
    assert f"{file}: dequantised from Q8_0 to bfloat16" in caplog.text


def test_how_texts_are_split_into_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Digits may be words of their own, which transformers does not know. Others are split as for GPT-2."""
    words = {}
    for how in ("qwen2", "smollm", "gpt-2", "nobody-knows"):
        file = tmp_path / f"{how}.gguf"
        write_gguf(file, random_model(), "llama", Q8, extra={"tokenizer.ggml.pre": how})
        splits = load_tokenizer(str(file)).backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 12")
        words[how] = [word for word, _ in splits]
    assert words["smollm"] == ["in", "Ġ", "1", "2"]
    assert words["gpt-2"] == words["nobody-knows"] == ["in", "Ġ12"]
    assert words["qwen2"] == ["in", "Ġ", "1", "2"]
    assert [record.message for record in caplog.records if "is not known" in record.message] == [
        f"{tmp_path / 'nobody-knows.gguf'}: tokenizer.ggml.pre = 'nobody-knows' is not known here: texts are split into"
        " words as for GPT-2, so some tokens may be unusual for the model"
    ]


def test_what_else_names_a_model(file: str) -> None:
    settings = load_settings(None, target={"model": file}, draft={"model": "ngram"})
    assert served_name(settings) == "mine"
    assert parameters(file, "target") == random_model().num_parameters()
    assert "parameters" in CHECKS["weights"](settings)
    assert CHECKS["models"](settings).startswith(f"target {file} (vocabulary of 256, context of 8192 tokens)")
    before = target_fingerprint(settings)
    Path(file).with_name("model.safetensors").write_bytes(b"another model")
    assert target_fingerprint(settings) == before
    write_gguf(Path(file), random_model(seed=1), "llama", Q8)
    other = target_fingerprint(settings)
    write_gguf(Path(file), random_model(seed=1), "llama", Q8, extra={"tokenizer.ggml.eos_token_id": 8})
    assert len({before, other, target_fingerprint(settings)}) == 3


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5000])


def cut_in_its_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:200])


def another_file(file: Path) -> None:
    file.write_bytes(b"not what its name says")


@pytest.mark.parametrize("damage", [cut_off, cut_in_its_header, another_file, Path.unlink])
def test_a_damaged_file(damage: Callable[[Path], None], file: str) -> None:
    damage(Path(file))
    with pytest.raises(UnknownModelError) as refusal:
        load_model(file, "drafter", "float32", "cpu")
    assert str(refusal.value).startswith(f"drafter: '{file[:60]}"), "long paths are shortened"
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("extra", "tensors", "named"),
    [
        ({"general.architecture": "falcon"}, {}, "architecture 'falcon' must be one of llama, qwen2, qwen3, qwen3moe"),
        ({"llama.context_length": None}, {}, "it lacks llama.context_length"),
        ({"llama.rope.dimension_count": 8}, {}, "llama.rope.dimension_count must be the size of a head, 16"),
        (scaling("llama", "longrope", 2.0), {}, "longrope"),
        (scaling("llama", "yarn", 2.0, yarn_beta_fast=3.0), {}, "rope.scaling.yarn_beta_fast is not supported"),
        ({}, {"blk.0.attn_q.bias": np.ones(64, np.float32)}, "LlamaForCausalLM has not: blk.0.attn_q.bias"),
    ],
)
def test_what_is_not_served_rightly(
    extra: dict[str, Any], tensors: dict[str, np.ndarray], named: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf", random_model(), "llama", extra=extra, tensors=tensors)
    with pytest.raises((UnknownModelError, UnsupportedModelError)) as refusal:
        load_model(file, "target", "float32", "cpu")
    assert named in str(refusal.value)


def test_the_package_that_reads_them(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.modeling_gguf_pytorch_utils.is_gguf_available", lambda: False)
    with pytest.raises(UnknownModelError, match=r"holds no weights that load \(Please install torch and gguf"):
        load_model(file, "target", "float32", "cpu")
