"""Packed weights: the same products, on the kinds of CPU where they are faster."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.exactness.cases import finish
from tests.random_models import FAMILIES, random_model, random_pair, random_tokens, with_noise
from tests.unit.core.models.test_join import logits_of
from triforce_core.building import runners
from triforce_core.building.assembly import local_engine
from triforce_core.building.draft_model import streaming_kv
from triforce_core.building.runners import runner_for
from triforce_core.config import load_settings
from triforce_core.engine.sequence import Request
from triforce_core.messages import SamplingParams, Tier
from triforce_core.models import pack
from triforce_core.models.pack import Packed, pack_weights, packing_pays
from triforce_core.models.quantize import quantize_weights, weight_bytes

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing pays on any machine."""
    monkeypatch.setattr(pack, "packing_pays", lambda dtype: True)


def packed_of(model: nn.Module) -> list[Packed]:
    return [module for module in model.modules() if isinstance(module, Packed)]


@needs_onednn
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 9, 70])
def test_logits_are_the_same(family: str, length: int, pays: None) -> None:
    """Some models have grouped query heads, and Qwen2 has biases."""
    model = random_pair(family).ours
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias)  # transformers begins with zeros
    expected, stored = logits_of(model, length), weight_bytes(model)
    pack_weights(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
    torch.testing.assert_close(logits_of(model, length), expected, atol=2e-5, rtol=0)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    own_head = head.weight.nbytes if model.config.tie_word_embeddings else 0
    assert weight_bytes(model) == stored + own_head
    assert type(table) is nn.Embedding


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, 9, 70])
def test_products_are_the_same(rows: int, dtype: torch.dtype) -> None:
    """There may be no tokens at all: no token of a prompt's chunk needs logits unless the prompt ends there."""
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 products")
    layer, hidden = nn.Linear(96, 160, dtype=dtype), torch.randn(1, rows, 96, dtype=dtype)
    torch.testing.assert_close(Packed(layer)(hidden), layer(hidden))


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_do_not_depend_on_the_threads_at_packing(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 products")
    layer, before, packed = nn.Linear(384, 1024, dtype=dtype), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            packed.append(Packed(layer))
    finally:
        torch.set_num_threads(before)
    for rows in (1, 4, 9):
        hidden = torch.randn(rows, 384, dtype=dtype)
        assert torch.equal(packed[0](hidden), packed[1](hidden))


@needs_onednn
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_speculation_changes_no_token(temperature: float, pays: None) -> None:
    target, _ = random_pair()
    drafter, prompt = with_noise(target, 0.1), random_tokens(300, seed=1)
    engine = local_engine(target, drafter, load_settings(dtype="float32", retrieval={"budget": 512, "chunk": 8}))
    assert packed_of(target)
    assert packed_of(drafter)
    plain, drafted = (
        finish(engine, [Request(prompt, 60, SamplingParams(temperature), 3, lookaheads)])
        for lookaheads in ((0, 0), (6, 2))
    )
    assert drafted.tokens == plain.tokens
    assert max(drafted.acceptances(Tier.TARGET)) > 0.2


@needs_onednn
def test_old_weights_are_freed_one_after_another(pays: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    old = [weakref.ref(module.weight) for module in model.modules() if type(module) is nn.Linear]
    most: list[int] = []

    class Watched(Packed):
        def __init__(self, layer: nn.Linear) -> None:
            most.append(len(packed_of(model)) + sum(each() is not None for each in old))
            super().__init__(layer)

    monkeypatch.setattr(pack, "Packed", Watched)
    pack_weights(model)
    assert max(most) == len(old)
    assert not any(each() is not None for each in old)


@needs_onednn
def test_a_second_call_changes_nothing(pays: None) -> None:
    """Two tiers may share a model, so it may be called twice."""
    model = random_model()
    pack_weights(model)
    packed = packed_of(model)
    assert packed
    pack_weights(model)
    assert packed_of(model) == packed


@needs_onednn
def test_quantised_layers_stay_as_they_are(pays: None) -> None:
    model = random_model()
    quantize_weights(model)
    pack_weights(model)
    assert packed_of(model) == [model.get_output_embeddings()]


@needs_onednn
@pytest.mark.parametrize("fused", [False, True])
def test_a_runner_on_a_cpu_packs_what_is_not_fused(fused: bool, pays: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "fuse", lambda model, settings: fused)
    monkeypatch.setattr(runners, "fused_noisiest", lambda *given: None)
    model, settings = random_model(), load_settings(device="cpu")
    runner_for(model, streaming_kv(model, settings), settings, few_tokens=2)
    assert bool(packed_of(model)) is not fused


@needs_onednn
def test_models_divided_over_ranks_stay_as_they_are(pays: None) -> None:
    model = random_model()
    model._tp_size = 2
    assert model.tp_size == 2
    pack_weights(model)
    assert not packed_of(model)


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
