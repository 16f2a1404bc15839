"""Whether a target is exact is found at start, by the bits of its logits; what to do about it, by the settings."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.random_models import random_model
from triforce_core.building.exactness import exact_fingerprint, make_exact
from triforce_core.building.runners import runner_for
from triforce_core.building.target_kv import target_kv
from triforce_core.config import Settings, load_settings
from triforce_core.errors import InvalidValueError
from triforce_core.kv.full import FullKV
from triforce_core.models import pack
from triforce_core.models.load import ATTENTION
from triforce_core.models.pack import Packed
from triforce_core.models.runner import ModelRunner


def target(
    change: Callable[[nn.Module], None] = lambda model: None, **given: Any
) -> tuple[ModelRunner, FullKV, Settings]:
    settings = Settings.model_validate({"dtype": "bfloat16", "target": {"kv_pool_tokens": 4096}, **given})
    model = random_model().to(getattr(torch, settings.dtype))
    model.set_attn_implementation(ATTENTION)
    kv = target_kv(model, settings)
    runner = runner_for(model, kv, settings, 9)
    change(model)
    return runner, kv, settings


class OtherByRows(nn.Module):
    """A linear layer whose product differs a little for numbers of rows for which the rule holds."""

    def __init__(self, layer: nn.Module, rule: Callable[[int], bool]) -> None:
        super().__init__()
        self.layer, self.rule = layer, rule

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.layer(hidden)
        return found * 1.01 if self.rule(hidden.shape[-2]) else found


def other_by_rows(rule: Callable[[int], bool]) -> Callable[[nn.Module], None]:
    """All linear layers of a model, the output head included, become such ones."""

    def change(model: nn.Module) -> None:
        for module in [*model.modules()]:
            for name, layer in [*module.named_children()]:
                if isinstance(layer, nn.Linear | Packed):
                    setattr(module, name, OtherByRows(layer, rule))

    return change


def test_a_target_on_this_machine_is_exact() -> None:
    runner, kv, settings = target()
    before = torch.get_num_threads()
    assert make_exact(runner, kv, settings) == ""
    assert kv.in_blocks
    assert kv.used_tokens == kv.kept_tokens == kv.dropped_tokens == 0
    assert kv.shares
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("rule", "padding"),
    [(lambda rows: rows % 2 == 1, 2), (lambda rows: rows < 5, 8), (lambda rows: rows == 16, None)],
)
def test_passes_are_padded_to_numbers_of_tokens_that_agree(rule: Callable[[int], bool], padding: int | None) -> None:
    runner, kv, settings = target(other_by_rows(rule))
    assert (make_exact(runner, kv, settings) == "") == (padding is not None)
    assert runner.padding == (padding or 1)


@pytest.mark.parametrize("packs", [True, False])
def test_float32_is_exact_with_either_product(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of oneDNN, for packed weights, and of MKL, which computes one row in another way than several."""
    monkeypatch.setattr(pack, "packing_pays", lambda dtype: packs)
    runner, kv, settings = target(dtype="float32")
    assert any(isinstance(layer, Packed) for layer in runner.model.modules()) == packs
    assert make_exact(runner, kv, settings) == ""


def test_where_no_padding_helps_the_target_attends_as_without_it(caplog: pytest.LogCaptureFixture) -> None:
    runner, kv, settings = target(other_by_rows(lambda rows: rows > 100))
    with caplog.at_level(logging.INFO):
        why = make_exact(runner, kv, settings)
    assert why == "on this machine the bits of a token depend on the number of tokens in the pass"
    assert why in caplog.text
    assert not kv.in_blocks
    assert runner.padding == 1


def test_a_start_that_demands_it_fails_then() -> None:
    runner, kv, settings = target(other_by_rows(lambda rows: rows > 100), exact="on")
    with pytest.raises(InvalidValueError, match="exact: 'on' cannot be kept: on this machine the bits"):
        make_exact(runner, kv, settings)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"exact": "off"}, "exact is off"),
        ({"attention": "reference"}, "attention is reference"),
        ({"graphs": "eager"}, "graphs is eager"),
        ({"device": "cuda"}, "on CUDA exact must be on, because attention in blocks is slow there"),
        ({"target": {"tensor_parallel": 2}}, "target.tensor_parallel is 2"),
        ({"target": {"eviction": "streaming"}}, "target.eviction is streaming"),
        ({"device": "cuda", "exact": "on"}, ""),
        ({}, ""),
    ],
    ids=str,
)
def test_settings_that_rule_it_out(given: dict[str, Any], why: str) -> None:
    assert Settings.model_validate(given).inexact == why


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"attention": "reference"}, "attention is reference"),
        ({"target": {"tensor_parallel": 2}}, "target.tensor_parallel is 2"),
        ({"target": {"eviction": "streaming"}}, "target.eviction is streaming"),
    ],
    ids=str,
)
def test_settings_that_rule_it_out_are_refused_where_it_is_demanded(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidValueError, match=f"exact 'on' must be auto or off where {why}"):
        load_settings(exact="on", **given)


def test_the_fingerprint_names_the_machine() -> None:
    settings = load_settings()
    found = exact_fingerprint("fp_1", settings)
    assert found.startswith("fp_1_exact_")
    assert found == exact_fingerprint("fp_1", settings)
    assert found != exact_fingerprint("fp_1", load_settings(compile="on"))
