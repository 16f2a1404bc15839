"""Joined linear layers: the same logits from fewer products, and never two copies of the weights."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from tests.compiling import needs_a_compiler, nothing_compiles
from tests.random_models import FAMILIES, random_model, random_pair, random_tokens
from tests.stating import spec
from triforce_core.attention import KERNELS
from triforce_core.building.draft_model import streaming_kv
from triforce_core.building.runners import runner_for
from triforce_core.config import load_settings
from triforce_core.kv.base import Forward
from triforce_core.kv.streaming import StreamingKV, WindowSettings
from triforce_core.messages import Span
from triforce_core.models import join
from triforce_core.models.fuse import fuse
from triforce_core.models.join import Joined, Part, join_projections
from triforce_core.models.load import kv_geometry
from triforce_core.models.quantize import rounded, weight_bytes
from triforce_core.models.runner import ModelRunner


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "linear")
        return func(*args, **(kwargs or {}))


def logits_of(model: PreTrainedModel, length: int) -> Tensor:
    kv = StreamingKV(kv_geometry(model), 1, WindowSettings(4, 200, 40), KERNELS["reference"])
    span = Span(1, 0, random_tokens(length, seed=length), spec(length))
    return ModelRunner(model, kv).forward([Forward(span, length)])[0]


def logits_and_products(model: PreTrainedModel, length: int) -> tuple[Tensor, int]:
    with Products() as products:
        logits = logits_of(model, length)
    return logits, products.count


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 2, 70])
def test_logits_are_the_same_from_three_products_less_a_layer(family: str, length: int) -> None:
    """Some models have grouped query heads, and Qwen2 has biases."""
    model = random_pair(family).ours
    expected, before = logits_and_products(model, length)
    stored, blocks = weight_bytes(model), model.config.num_hidden_layers
    join_projections(model)
    found, after = logits_and_products(model, length)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert before - after == 3 * blocks
    assert weight_bytes(model) == stored
    assert all(module.latest is None for module in model.modules() if isinstance(module, Joined)), "keeps activations"


def test_a_second_call_changes_nothing() -> None:
    """Two tiers may share a model, so it may be called twice."""
    model = random_model()
    join_projections(model)
    joined = [module for module in model.modules() if isinstance(module, Joined)]
    join_projections(model)
    assert [module for module in model.modules() if isinstance(module, Joined)] == joined
    assert len(joined) == 2 * model.config.num_hidden_layers


def test_old_weights_are_freed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a block's weights are joined, the old weights of the blocks before it are gone."""
    model = random_model()
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    old = [
        weakref.ref(m.weight)
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and n.split(".")[-1] in names
    ]
    freed: list[int] = []
    own_cat = torch.cat

    def cat(tensors: list[Tensor]) -> Tensor:
        freed.append(sum(each() is None for each in old))
        return own_cat(tensors)

    monkeypatch.setattr(join.torch, "cat", cat)
    join_projections(model)
    assert freed == [5 * (i // 2) + 3 * (i % 2) for i in range(2 * model.config.num_hidden_layers)]
    assert sum(each() is None for each in old) == len(old)


def test_parts_are_right_in_any_order_and_of_any_input() -> None:
    """If a part gets another input than the latest, it is computed anew, whatever is left of the latest."""
    layers = [nn.Linear(6, size) for size in (4, 3, 5)]
    expected = copy.deepcopy(layers)
    parts = [Part(joined, i) for joined in [Joined(layers)] for i in range(3)]
    a, b = torch.randn(2, 6), torch.randn(2, 6)
    for index, hidden in [(2, a), (0, a), (1, b), (1, b), (1, a), (0, b), (2, b), (2, b), (0, a), (0, a)]:
        torch.testing.assert_close(parts[index](hidden), expected[index](hidden))


def test_what_cannot_be_joined_stays() -> None:
    """These are layers of which only some have a bias or are quantised, and models that are divided over ranks."""
    quantised = random_model()
    attention = quantised.model.layers[0].self_attn
    attention.k_proj = rounded(attention.k_proj)
    join_projections(quantised)
    mixed = random_model()
    key = mixed.model.layers[0].self_attn.k_proj
    key.bias = nn.Parameter(torch.zeros(key.out_features))
    join_projections(mixed)
    divided = random_model()
    divided._tp_size = 2
    join_projections(divided)
    most = 2 * mixed.config.num_hidden_layers
    for model, count in ((quantised, most - 1), (mixed, most - 1), (divided, 0)):
        assert sum(isinstance(module, Joined) for module in model.modules()) == count


def test_without_memory_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_pair().ours
    expected = logits_of(model, 3)
    own, made = Joined.__init__, list[Joined]()

    def scarce(self: Joined, layers: list[nn.Linear]) -> None:
        if made:
            raise torch.OutOfMemoryError("out of memory")
        own(self, layers)
        made.append(self)

    monkeypatch.setattr(Joined, "__init__", scarce)
    join_projections(model)
    torch.testing.assert_close(logits_of(model, 3), expected, atol=2e-5, rtol=0)
    assert sum(isinstance(module, Joined) for module in model.modules()) == 1


def test_on_a_cpu_nothing_is_joined() -> None:
    """On a CPU, joining would change the rounding and gain nothing."""
    model, settings = random_model(), load_settings(dtype="float32", max_sequences=1, draft={"window": 20})
    runner_for(model, streaming_kv(model, settings), settings, 4)
    assert not any(isinstance(module, Joined) for module in model.modules())


@needs_a_compiler
def test_compiled_blocks_take_joined_layers_too() -> None:
    """One product gives both halves, and nothing is compiled after the start."""
    torch._dynamo.reset()
    counters.clear()
    model = random_pair(num_hidden_layers=3).ours
    expected = {length: logits_of(model, length) for length in (1, 2, 7, 64)}
    join_projections(model)
    assert fuse(model, load_settings(dtype="float32", compile="on"))
    assert counters["stats"]["unique_graphs"] == 6, "norm, rotation and block, for one token and for more"
    with nothing_compiles():
        for length, logits in expected.items():
            torch.testing.assert_close(logits_of(model, length), logits, atol=5e-5, rtol=0)
    assert all(module.latest is None for module in model.modules() if isinstance(module, Joined))
    torch._dynamo.reset()
