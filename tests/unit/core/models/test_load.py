"""What the loader refuses, and that it says why: a model served wrongly would be worse than one not served."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from tests.random_models import FAMILIES, WINDOWED, random_model, random_pair
from triforce_core import __version__
from triforce_core.errors import InvalidValueError, UnknownModelError, UnsupportedModelError
from triforce_core.models import load
from triforce_core.models.files import (
    check_pair,
    context_length,
    load_config,
    load_tokenizer,
    stop_token_ids,
)
from triforce_core.models.load import ATTENTION, attention_through_kv, check_attention, kv_geometry, load_model
from triforce_core.models.refused import check_supported

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 128, **values}


REFUSED: dict[str, tuple[PretrainedConfig, str, str]] = {
    "Gemma 2": (Gemma2Config(**TINY), "attn_logit_softcapping", "50.0"),
    "layers with a window of no length": (
        Qwen2Config(**TINY, sliding_window=None, layer_types=["sliding_attention", "full_attention"]),
        "sliding_window",
        "None",
    ),
    "dynamic RoPE": (LlamaConfig(**TINY, rope_parameters=rope("dynamic", factor=2.0)), "rope_type", "dynamic"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_features_that_are_not_honoured_are_refused_by_name(name: str, tmp_path: Path) -> None:
    config, feature, value = REFUSED[name]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as refusal:
        load_config(str(tmp_path), "target")
    for part in (str(tmp_path), feature, value):
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**TINY),
        MistralConfig(**TINY, sliding_window=None),
        Qwen2Config(**TINY),  # has a sliding_window, and use_sliding_window off
        Qwen2Config(**TINY, use_sliding_window=True, sliding_window=512, max_window_layers=1),
        LlamaConfig(**TINY, rope_parameters=rope("linear", factor=2.0)),
        LlamaConfig(**TINY, rope_parameters=rope("yarn", factor=2.0)),
        LlamaConfig(**TINY, rope_parameters=rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    ],
    ids=["mistral", "mistral without a window", "qwen2", "qwen2 with its window on", "linear", "yarn", "llama3"],
)
def test_features_that_are_off_or_honoured_pass(config: PretrainedConfig) -> None:
    check_supported(config, "a model")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_and_says_the_shape_of_its_kv(family: str, tmp_path: Path) -> None:
    random_model(family).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), "target", "bfloat16", "cpu")
    geometry = kv_geometry(model)
    assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim) == (2, 2, 16)
    assert geometry.bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert context_length(model.config) == 8192
    assert not model.training


UNSEEN = {
    "a window that the model does not heed": lambda: LlamaForCausalLM(LlamaConfig(**TINY, sliding_window=64)),
    "attention that bypasses our caches": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    ),
    "attention classes of its own": lambda: FalconForCausalLM(
        FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    ),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_the_configuration_does_not_show_is_refused_too(name: str, tmp_path: Path) -> None:
    UNSEEN[name]().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=str(tmp_path)):
        load_model(str(tmp_path), "target", "float32", "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED])
def test_attention_that_differs_by_rounding_alone(family: str, dtype: torch.dtype) -> None:
    ours = random_pair(family).ours.to(dtype)
    check_attention(ours, "a model")
    assert ours.config._attn_implementation == ATTENTION, "it attends through our caches again"


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("wrong", [-1, 1, None])
def test_windows_that_are_not_those_of_transformers(
    family: str, wrong: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another length, or none: in eight tokens, too, though the model's own are longer."""
    monkeypatch.setattr(load, "windows", lambda config: (config.sliding_window + wrong, {0}) if wrong else (0, {}))
    with pytest.raises(UnsupportedModelError, match="attention through our caches changes its logits"):
        check_attention(random_pair(family).ours, "mine")


def test_sinks_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(*given: Any, s_aux: Tensor, **asked: Any) -> Any:
        return attention_through_kv(*given, s_aux=s_aux if keep else None, **asked)

    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION, attention)
    model, keep = random_pair("gpt_oss").ours, True
    check_attention(model, "mine")
    keep = False
    with pytest.raises(UnsupportedModelError, match="attention through our caches changes its logits"):
        check_attention(model, "mine")


def scaled(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query * 2, key, value


def with_other_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query, key.flip(1), value.flip(1)


def without_the_first_pass(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return query, key, value if query.shape[2] == 3 else torch.zeros_like(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrong", [scaled, with_other_heads, without_the_first_pass])
def test_attention_that_differs_from_that_of_transformers(
    wrong: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
        return attention_through_kv(module, *wrong(query, key, value), *rest, **more)

    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION, attention)
    with pytest.raises(UnsupportedModelError, match=r"^model 'mine': attention through our caches changes its logits"):
        check_attention(random_pair().ours.to(dtype), "mine")


def test_logits_that_are_not_finite() -> None:
    model = random_pair().ours
    model.lm_head.weight.data[7] = torch.nan
    with pytest.raises(UnsupportedModelError, match=r"^model 'mine': its logits are not finite in torch.float32"):
        check_attention(model, "mine")


def nothing(path: Path) -> None:
    """An empty directory."""


def no_weights(path: Path) -> None:
    random_model().config.save_pretrained(path)


def broken_weights(path: Path) -> None:
    no_weights(path)
    (path / "model.safetensors").write_bytes(b"not safetensors")


def broken_config(path: Path) -> None:
    (path / "config.json").write_text("{")


def unknown_type(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "nobody-knows"}')


@pytest.mark.parametrize("damage", [nothing, no_weights, broken_weights, broken_config, unknown_type])
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_directory_that_holds_no_model(damage: Callable[[Path], None], role: str, tmp_path: Path) -> None:
    damage(tmp_path)
    with pytest.raises(UnknownModelError) as refusal:
        load_model(str(tmp_path), role, "float32", "cpu")
    assert str(refusal.value).startswith(f"{role}: ")
    assert str(tmp_path) in str(refusal.value)


@pytest.mark.parametrize("name", ["/no/such/directory", "./no-such-directory", "~/no-such-directory"])
def test_a_missing_directory_is_never_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(UnknownModelError, match=r"is not a directory with a config\.json"):
        load_config(name, "target")


def test_an_unknown_dtype() -> None:
    with pytest.raises(InvalidValueError, match=r"dtype: 'int8' must be one of float32, bfloat16, float16"):
        load_model("demo", "target", "int8", "cpu")


def test_a_pair_with_other_vocabularies_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    """Padding of the embedding counts as tokens, because the target could draw them."""
    for name, size in (("target", 320), ("drafter", 300)):
        LlamaConfig(**TINY | {"vocab_size": size}).save_pretrained(tmp_path / name)
    with pytest.raises(
        InvalidValueError, match=r"has 300 tokens: must have the target's 320, or set draft\.model: ngram"
    ):
        check_pair(str(tmp_path / "target"), str(tmp_path / "drafter"))
    check_pair(str(tmp_path / "target"), None)


def test_the_demo_pair_where_its_weights_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triforce_serve_demo", None)  # its import raises what that of no package raises
    needed = re.escape(f"pip install triforce-serve-demo=={__version__}")
    for given in (
        lambda: load_config("demo", "target"),
        lambda: load_tokenizer("demo"),
        lambda: stop_token_ids("demo"),
    ):
        with pytest.raises(UnknownModelError, match=rf"^target: 'demo' needs the weights .*: {needed}$"):
            given()


def test_the_demo_pair() -> None:
    """The pair has one vocabulary, and a tokenizer that gives text back."""
    target, drafter = load_config("demo", "target"), load_config("demo", "drafter")
    assert target.vocab_size == drafter.vocab_size
    tokenizer = load_tokenizer("demo")
    assert len(tokenizer) <= target.vocab_size
    assert all(0 <= token < target.vocab_size for token in stop_token_ids("demo"))
    text = "def greet(name: str) -> None:\n    print(f'héllo {name} ☃')\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    ("owner", "method", "error"),
    [
        (AutoModelForCausalLM, "from_pretrained", OSError(12, "Cannot allocate memory")),
        (AutoModelForCausalLM, "from_pretrained", MemoryError("Cannot allocate memory")),
        (PreTrainedModel, "to", torch.OutOfMemoryError("Cannot allocate memory")),
    ],
    ids=["read", "no memory", "moved to the device"],
)
def test_too_little_memory_is_not_told_as_damaged_weights(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, error: Exception
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(owner, method, full)
    with pytest.raises(InvalidValueError, match=r"^target: 'demo' takes more memory than there is .*Cannot allocate"):
        load_model("demo", "target", "float32", "cpu")
