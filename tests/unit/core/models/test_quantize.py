"""8-bit weights: what is rounded and how well, what stays as it was, and whose memory it is."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.random_models import FAMILIES, random_model
from tests.unit.core.models.test_join import logits_of
from triforce_core.config import load_settings
from triforce_core.errors import InvalidValueError
from triforce_core.models.int8_product import DEPTH, MOST_ROWS, MOST_TILES, OUTPUTS, has_kernel, int8_product
from triforce_core.models.join import Joined, join_projections
from triforce_core.models.quantize import Int8Linear, quantize_weights, quantized_copy, rounded, weight_bytes


def test_other_kinds_are_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"retrieval\.quantization: .*'int8'"):
        load_settings(retrieval={"quantization": "int4"})


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_head_and_norms_stay(tied: bool) -> None:
    model = random_model(tie_word_embeddings=tied)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    size = weight_bytes(model)
    quantize_weights(model)
    after = dict(model.named_parameters())
    changed = [name for name, weight in after.items() if weight.dtype is torch.int8]
    assert changed == [name for name in before if name.endswith("_proj.weight")]
    for name, weight in before.items():
        if name in changed:
            scale = after[name.replace("weight", "scale")]
            error = (after[name] * scale[:, None] - weight).abs()
            assert bool((error <= scale[:, None] / 2 * 1.001).all()), "to the nearest of 255 steps"
        else:
            assert torch.equal(after[name], weight)
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    assert (head.weight is model.get_input_embeddings().weight) == tied
    assert weight_bytes(model) < 0.6 * size


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_shares_what_is_not_rounded(family: str) -> None:
    model = random_model(family)
    expected, before = logits_of(model, 7), {name: each.data_ptr() for name, each in model.named_parameters()}
    copied = quantized_copy(model)
    assert torch.equal(logits_of(model, 7), expected), "the model is as it was"
    own = {name for name, each in copied.named_parameters() if before.get(name) != each.data_ptr()}
    assert own == {name for name in dict(copied.named_parameters()) if name.endswith(("_proj.weight", "_proj.scale"))}
    found = logits_of(copied, 7)
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()


def test_rows_of_zeros_stay_zeros() -> None:
    """Trained models have some: heads that nobody needs."""
    layer = nn.Linear(16, 4)
    with torch.no_grad():
        layer.weight[1] = 0
    found = rounded(layer)(torch.randn(3, 16))
    assert torch.equal(found[:, 1], layer.bias[1].expand(3))


@pytest.mark.parametrize("bias", [False, True])
def test_joined_layers_are_one_of_the_same_rows(bias: bool) -> None:
    model = random_model("qwen2" if bias else "llama")
    quantize_weights(model)
    expected = logits_of(model, 5)
    join_projections(model)
    assert sum(isinstance(module, Joined) for module in model.modules()) == 2 * model.config.num_hidden_layers
    assert torch.equal(logits_of(model, 5), expected)


# -- The kernel, in Triton's interpreter, which computes with NumPy: `make ci` installs Triton and sets the variable. --

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None, reason="needs Triton and its interpreter"
)


@interpreted
@pytest.mark.parametrize("tokens", [1, 4, 17, 3 * MOST_ROWS])
@pytest.mark.parametrize("shape", [(OUTPUTS, DEPTH), (3 * OUTPUTS, 2 * DEPTH), (70, 300), (5, 40)], ids=str)
def test_the_kernel_against_float64(tokens: int, shape: tuple[int, int]) -> None:
    """In float16: NumPy has no bfloat16."""
    torch.manual_seed(0)
    layer = rounded(nn.Linear(shape[1], shape[0], bias=False).half())
    hidden = torch.randn(tokens, shape[1], dtype=torch.float16)
    expected = hidden.double() @ (layer.weight.double() * layer.scale.double()[:, None]).T
    found: Tensor = int8_product(hidden, layer.weight, layer.scale)
    assert found.dtype is torch.float16
    assert (found.double() - expected).norm() < 1e-3 * expected.norm()


@interpreted
def test_a_layer_uses_it_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = rounded(nn.Linear(40, 20).half())
    hidden = torch.randn(1, MOST_TILES * MOST_ROWS, 40, dtype=torch.float16)
    without = layer(hidden)
    layer.by_kernel = True
    torch.testing.assert_close(layer(hidden), without, atol=2e-3, rtol=2e-3)
    monkeypatch.setattr("triforce_core.models.int8_product.kernel", lambda: pytest.fail("it would read weights often"))
    assert torch.equal(layer(hidden.repeat(1, 2, 1)), torch.cat([without, without], dim=1))


def test_sums_do_not_overflow_in_float16() -> None:
    """One of a few large activations, as trained models have them, times 127 would."""
    layer = rounded(nn.Linear(4096, 8, bias=False).half())
    hidden = torch.randn(200, 4096, dtype=torch.float16)
    hidden[:, 3] = 4000.0
    assert layer(hidden).isfinite().all()


def test_routers_and_gates_stay() -> None:
    model = random_model("qwen3")
    model.model.layers[0].mlp.gate = nn.Linear(model.config.hidden_size, 1)
    quantize_weights(model)
    assert isinstance(model.model.layers[0].mlp.gate, nn.Linear)


def test_where_the_kernel_cannot_run_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Tensor) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr("triforce_core.models.int8_product.int8_product", fails)
    has_kernel.cache_clear()
    with FakeTensorMode():
        assert not has_kernel(torch.device("cuda", 0), torch.bfloat16)
        assert not has_kernel(torch.device("cuda", 0), torch.float32)
    assert not has_kernel(torch.device("cpu"), torch.bfloat16)
    has_kernel.cache_clear()
    first, second = caplog.messages
    assert "int8 saves memory, and steps get slower: our kernel fails on cuda:0 (" in first
    assert second.endswith("our kernel takes bfloat16 and float16, and dtype is torch.float32")


def test_tensors_without_data_pass_through() -> None:
    layer = Int8Linear(
        torch.empty(8, 6, dtype=torch.int8, device="meta"), torch.empty(8, dtype=torch.bfloat16, device="meta"), None
    )
    layer.by_kernel = True
    assert layer(torch.empty(1, 3, 6, dtype=torch.bfloat16, device="meta")).shape == (1, 3, 8)
