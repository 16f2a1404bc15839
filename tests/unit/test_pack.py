"""Packed weights: the same products, on the kinds of CPU where they are faster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.random_models import FAMILIES, random_model, random_pair
from tests.unit.test_join import logits_of
from triforce_core.config import load_settings
from triforce_core.engine.assembly import runner_for, streaming_kv
from triforce_core.models import pack
from triforce_core.models.pack import Packed, pack_weights, packing_pays
from triforce_core.models.quantize import quantize_weights, weight_bytes

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs on any machine."""
    monkeypatch.setattr(pack, "packing_pays", lambda dtype: True)


def packed_of(model: nn.Module) -> list[Packed]:
    return [module for module in model.modules() if isinstance(module, Packed)]


@needs_onednn
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 9, 70])
def test_logits_are_the_same(family: str, length: int, pays: None) -> None:
    """With grouped query heads, and with the biases of Qwen2."""
    model = random_pair(family).ours
    expected, stored = logits_of(model, length), weight_bytes(model)
    pack_weights(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
    torch.testing.assert_close(logits_of(model, length), expected, atol=2e-5, rtol=0)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    own_head = head.weight.nbytes if model.config.tie_word_embeddings else 0
    assert weight_bytes(model) == stored + own_head
    assert type(table) is nn.Embedding


@needs_onednn
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 products")
@pytest.mark.parametrize("rows", [0, 1, 2, 9, 70])
def test_bfloat16_products_are_the_same(rows: int) -> None:
    layer = nn.Linear(96, 160, dtype=torch.bfloat16)
    hidden = torch.randn(1, rows, 96, dtype=torch.bfloat16)
    torch.testing.assert_close(Packed(layer)(hidden), layer(hidden))


@needs_onednn
def test_a_second_call_changes_nothing(pays: None) -> None:
    """Tiers may share a model."""
    model = random_model()
    pack_weights(model)
    packed = packed_of(model)
    assert packed
    pack_weights(model)
    assert packed_of(model) == packed


@needs_onednn
def test_quantised_layers_stay_as_they_are(pays: None) -> None:
    model = random_model()
    quantize_weights(model, "int8")
    pack_weights(model)
    assert packed_of(model) == [model.get_output_embeddings()]


@needs_onednn
def test_a_runner_on_a_cpu_packs(pays: None) -> None:
    model, settings = random_model(), load_settings(device="cpu")
    runner_for(model, streaming_kv(model, settings), settings, few_tokens=2)
    assert packed_of(model)


@pytest.mark.parametrize(
    ("vendor", "dtype", "expected"),
    [
        ("AuthenticAMD", torch.float32, True),
        ("GenuineIntel", torch.float32, False),
        ("", torch.float32, False),
        ("AuthenticAMD", torch.float16, False),
    ],
)
@needs_onednn
def test_it_pays_by_the_kind_of_cpu(vendor: str, dtype: torch.dtype, expected: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n" if vendor else "processor\t: 0\n", encoding="utf-8")
    assert packing_pays(dtype, cpuinfo) is expected


@needs_onednn
@pytest.mark.parametrize("supported", [True, False])
def test_bfloat16_pays_where_the_cpu_multiplies_it(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    assert packing_pays(torch.bfloat16) is supported
