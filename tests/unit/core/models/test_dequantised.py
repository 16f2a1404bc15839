"""Quantised checkpoints that are served dequantised: what is served is what the stored values give."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import pack_to_int32
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel

from deploy.checks import parameters
from tests.random_models import random_model
from tests.served import generated, served
from tests.unit.core.models.test_kinds import mistral3
from triforce_core.errors import UnknownModelError, UnsupportedModelError
from triforce_core.models.files import check_ranks, load_config
from triforce_core.models.load import load_model

BLOCK = 16
Stored = tuple[dict[str, Tensor], Tensor]  # the parts of a matrix as stored, by the ends of their names, and its values


def fp8_blocks(weight: Tensor) -> Stored:
    rows, columns = weight.shape
    blocks = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    stored = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    values = (stored.float() * scale[:, None, :, None]).reshape(rows, columns)
    return {"weight": stored.reshape(rows, columns), "weight_scale_inv": scale}, values


def fp8_whole(weight: Tensor) -> Stored:
    """With the scale of its input, too, which is not needed here."""
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scale, "activation_scale": scale.clone()}, stored.float() * scale


def fp8_rows(weight: Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def int8_rows(weight: Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round().to(torch.int8)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def int4_groups(weight: Tensor) -> Stored:
    groups = weight.reshape(weight.shape[0], -1, BLOCK)
    scale = groups.abs().amax(2) / 7
    stored = (groups / scale[..., None]).round()
    parts = {
        "weight_packed": pack_to_int32(stored.reshape(weight.shape).to(torch.int8), 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts, (stored * scale[..., None]).reshape(weight.shape)


def compressed(form: str, strategy: str, kind: str, bits: int, group: int | None = None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    common = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return common | {"format": form, "config_groups": groups}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FORMS: dict[str, tuple[Callable[[Tensor], Stored], dict[str, Any]]] = {
    "FP8 in blocks": (fp8_blocks, FP8 | {"weight_block_size": [BLOCK, BLOCK]}),
    "FP8, one scale": (fp8_whole, FP8 | {"activation_scheme": "static", "weight_block_size": None}),
    "compressed FP8": (fp8_rows, compressed("float-quantized", "channel", "float", 8)),
    "compressed int8": (int8_rows, compressed("int-quantized", "channel", "int", 8)),
    "compressed int4": (int4_groups, compressed("pack-quantized", "group", "int", 4, BLOCK)),
}


def quantised(folder: Path, form: str, model: PreTrainedModel | None = None) -> PreTrainedModel:
    """Write a checkpoint; returns the model with the values that it stores."""
    quantise, said = FORMS[form]
    model = model or random_model()
    model.save_pretrained(folder)
    weights, own = load_file(folder / "model.safetensors"), dict(model.named_parameters())
    for name in [name for name in weights if name.endswith("_proj.weight") and "vision_tower" not in name]:
        parts, values = quantise(weights.pop(name))
        weights |= {name.removesuffix("weight") + end: part.contiguous() for end, part in parts.items()}
        own[name.replace("language_model.model", "model.language_model")].data.copy_(values)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit(folder, quantization_config=said)
    return model


def edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_stored_is_served(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = quantised(tmp_path, form)
    with caplog.at_level(logging.INFO, "triforce_core"):
        assert served(str(tmp_path)) == generated(theirs)
    counted, held = parameters(str(tmp_path), "target"), sum(each.numel() for each in theirs.parameters())
    assert counted is not None
    assert held <= counted < 1.1 * held, "what is counted before it is loaded is what it takes"
    assert f"{tmp_path}: dequantised from {FORMS[form][1]['quant_method']} to float32" in caplog.text


@pytest.mark.parametrize("form", FORMS)
def test_the_text_part_of_a_quantised_checkpoint(form: str, tmp_path: Path) -> None:
    """Such as Ministral 3 as it is published."""
    theirs = quantised(tmp_path, form, mistral3("ministral3", tie=False))
    assert served(str(tmp_path)) == generated(theirs)


def test_mxfp4(tmp_path: Path) -> None:
    """Of gpt-oss: blocks of 32 values with a power of two each, two values a byte."""
    config = GptOssConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=30,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        initializer_range=0.15,
    )
    model = GptOssForCausalLM(config)
    model.save_pretrained(tmp_path)
    weights, expected = load_file(tmp_path / "model.safetensors"), {}
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = weights.pop(name).shape  # transformers holds matrices the other way round
        blocks = torch.randint(256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, (experts, columns, rows // 32), dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = torch.stack([numbers[(blocks & 15).long()], numbers[(blocks >> 4).long()]], -1).flatten(-2)
        scaled = values * 2.0 ** (scales.float() - 127)[..., None]
        expected[name] = scaled.flatten(-2).transpose(1, 2)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    edit(tmp_path, quantization_config={"quant_method": "mxfp4"})
    loaded = load_model(str(tmp_path), "target", "float32", "cpu").state_dict()
    assert len(expected) == 4
    for name, values in expected.items():
        torch.testing.assert_close(loaded[name], values, atol=0, rtol=0)
    model.load_state_dict(expected, strict=False)
    held = sum(each.numel() for each in model.parameters())
    assert 0.99 * held < (parameters(str(tmp_path), "target") or 0) < 1.1 * held
    assert served(str(tmp_path)) == generated(model.eval())


def test_scales_that_are_missing(tmp_path: Path) -> None:
    quantised(tmp_path, "FP8 in blocks")
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not name.endswith("_scale_inv")}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnknownModelError, match=r"lacks the scale of model\.layers\.0\..*weight"):
        load_model(str(tmp_path), "target", "float32", "cpu")


def test_forms_that_are_not_known(tmp_path: Path) -> None:
    quantised(tmp_path, "compressed FP8")
    for said in (
        compressed("nvfp4-pack-quantized", "tensor_group", "float", 4, 16),
        compressed("mixed-precision", "channel", "int", 8),
        {key: value for key, value in FORMS["compressed FP8"][1].items() if key != "format"},
    ):
        edit(tmp_path, quantization_config=said)
        with pytest.raises(
            UnsupportedModelError, match=r"quantization_config = 'compressed-tensors'.*is not supported"
        ):
            load_config(str(tmp_path), "target")


def test_the_package_that_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised(tmp_path, "compressed FP8")
    monkeypatch.setattr("triforce_core.models.dequantise.find_spec", lambda _: None)
    rule = "the package compressed-tensors must be installed to read it: pip install compressed-tensors"
    with pytest.raises(UnsupportedModelError, match=rule):
        load_config(str(tmp_path), "target")


def test_ranks(tmp_path: Path) -> None:
    quantised(tmp_path, "FP8 in blocks")
    with pytest.raises(
        UnsupportedModelError, match=r"target.tensor_parallel = 2: weights that are dequantised at load"
    ):
        check_ranks(load_config(str(tmp_path), "target"), str(tmp_path), 2, "target.tensor_parallel")
