"""Fused kernels: which parts of a model become some, that they compute the same, and how often anything is compiled."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from tests.compiling import needs_a_compiler, nothing_compiles
from tests.random_models import FAMILIES, random_model, random_pair, random_tokens
from tests.stating import spec
from triforce_core.attention import KERNELS
from triforce_core.config import Settings, load_settings
from triforce_core.errors import InvalidValueError
from triforce_core.kv.base import Forward
from triforce_core.kv.streaming import StreamingKV, WindowSettings
from triforce_core.messages import Span
from triforce_core.models import fuse as fusing
from triforce_core.models.fallback import say
from triforce_core.models.fuse import (
    compiled,
    compiling,
    fuse,
    has_own_forward,
    set_fused_forwards,
)
from triforce_core.models.graphs import shaped_passes
from triforce_core.models.load import kv_geometry
from triforce_core.models.quantize import quantize_weights
from triforce_core.models.runner import ModelRunner

FUSED = load_settings(dtype="float32", compile="on")
LENGTHS = (1, 2, 7, 64, 130)  # of passes


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """Forget whatever earlier tests have compiled and logged."""
    torch._dynamo.reset()
    counters.clear()
    say.cache_clear()
    yield
    torch._dynamo.reset()


def num_compiled() -> int:
    return int(counters["stats"]["unique_graphs"])


def ordinary_logits(model: PreTrainedModel, length: int) -> torch.Tensor:
    """The logits of all tokens of a text of this length, from one pass of ours."""
    kv = StreamingKV(kv_geometry(model), 1, WindowSettings(4, 200, 40), KERNELS["reference"])
    span = Span(1, 0, random_tokens(length, seed=length), spec(length))
    logits, _ = ModelRunner(model, kv).forward([Forward(span, length)])
    return logits


def fused_parts(model: PreTrainedModel) -> set[str]:
    return {name for name, module in model.named_modules() if has_own_forward(module)}


@needs_a_compiler
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family != "llama")]
)
def test_logits_are_the_same_and_each_function_is_compiled_twice(family: str) -> None:
    """One compilation is for one token, the other for more tokens, whatever the layers and the lengths."""
    model = random_pair(family, num_hidden_layers=4).ours
    expected = {length: ordinary_logits(model, length) for length in LENGTHS}
    assert fuse(model, FUSED)
    functions = 4 if family == "qwen3" else 3  # norm, rotation and block; norms of heads have another shape
    assert num_compiled() == 2 * functions
    with nothing_compiles():
        for length, logits in expected.items():
            torch.testing.assert_close(ordinary_logits(model, length), logits, atol=1e-4, rtol=1e-5)
        assert fuse(model, FUSED), "it is shared: once is enough"


@pytest.mark.slow
@needs_a_compiler
def test_passes_of_constant_shape_share_their_kernels() -> None:
    """There are sixteen shapes. Attention to the pass's own tokens is compiled for one sequence and for more, and for
    one token and for more; the draws of a chain for one sequence and for more.
    """
    model = random_pair(num_hidden_layers=3).ours
    kv = StreamingKV(kv_geometry(model), 8, WindowSettings(4, 200, 40), KERNELS["reference"])
    settings = FUSED.model_copy(update={"graphs": "eager", "max_sequences": 8})
    shaped = shaped_passes(model, kv, settings, 8, fused=True, ahead=4)
    assert shaped is not None
    assert len(shaped.passes) == 16
    assert len(shaped.chains) == 4
    assert num_compiled() == 4 + 2
    plain = shaped_passes(model, kv, settings, 8, ahead=4)
    assert plain is not None
    with nothing_compiles():
        for one, other in zip(shaped.chains, plain.chains, strict=True):
            for chain in (one, other):
                chain.logits.copy_(torch.randn(chain.logits.shape, generator=torch.Generator().manual_seed(1)))
                chain.draw(noisy=True)
            torch.testing.assert_close(one.found, other.found)
        for fused, ordinary in zip(shaped.passes, plain.passes, strict=True):
            torch.testing.assert_close(fused.run(), ordinary.run(), atol=1e-4, rtol=1e-5)


def test_a_rotation_that_is_a_kernel_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package `kernels` puts a module in the place of the function that rotates."""
    model = random_pair().ours
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", torch.nn.Identity())
    set_fused_forwards(model)
    parts = fused_parts(model)
    assert parts, "norms and blocks are fused"
    assert not [name for name in parts if name.endswith("self_attn")]


@needs_a_compiler
def test_a_copy_of_a_model_computes_with_weights_of_its_own() -> None:
    model = random_pair().ours
    fuse(model, FUSED)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert fused_parts(other) == fused_parts(model)
    assert ordinary_logits(other, 5).any()
    assert not ordinary_logits(model, 5).any()


def turned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1)


@needs_a_compiler
def test_many_models_do_not_use_up_what_may_be_compiled() -> None:
    """PyTorch compiles one function at most eight times. Here nine calls stand for nine models."""
    for dimensions in range(1, 10):
        compiled(turned)(torch.zeros([2] * dimensions))
    assert num_compiled() == 9


def scaled(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return tensor * scale


@needs_a_compiler
def test_a_scale_is_a_constant() -> None:
    """Another scale needs another kernel. If the scale were a tensor on the host, one kernel would do, but no graph
    could hold it.
    """
    function, ones = compiled(scaled), torch.ones(3)
    with compiling():
        assert function(ones, 0.25).eq(0.25).all()
    with nothing_compiles():
        assert function(ones, 0.25).eq(0.25).all()
        with pytest.raises(RuntimeError, match="recompile"):
            function(ones, 0.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_attention_and_blocks_are_fused(family: str) -> None:
    model = random_model(family)
    set_fused_forwards(model)
    norms = {"input_layernorm", "post_attention_layernorm"}
    parts = norms | {"self_attn", "mlp"} | ({"self_attn.q_norm", "self_attn.k_norm"} if family == "qwen3" else set())
    layers = {f"model.layers.{layer}.{part}" for layer in range(2) for part in parts}
    assert fused_parts(model) == layers | {"model.norm"}


@needs_a_compiler
def test_a_model_with_8_bit_weights_has_the_same_parts() -> None:
    whole, quantised = random_model(), random_model()
    quantize_weights(quantised)
    expected = ordinary_logits(quantised, 5)
    set_fused_forwards(whole)
    fuse(quantised, FUSED)
    assert fused_parts(whole) == fused_parts(quantised)
    torch.testing.assert_close(ordinary_logits(quantised, 5), expected, atol=1e-4, rtol=1e-4)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("triforce_core")]


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_a_divided_model_is_left_alone(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log says so once, where `compile: on` asked for more."""
    model = random_model()
    model._tp_size = 2
    for _ in range(2):
        assert not fuse(model, Settings(device="cuda", compile=mode))  # type: ignore[arg-type]
    assert not fused_parts(model)
    why = "compile: on does nothing here: models on several ranks, here 2, stay as they are"
    assert said(caplog) == ([why] if mode == "on" else [])


def test_a_model_with_nothing_to_fuse_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model()
    model.model.layers, model.model.norm = torch.nn.ModuleList(), torch.nn.Identity()
    assert not fuse(model, FUSED)
    assert said(caplog) == ["compile: on does nothing here: LlamaForCausalLM has no part that could become a kernel"]


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("mode", ["on", "auto"])
def test_no_memory_for_the_compiler_is_no_failing_compiler(
    mode: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Functions are compiled when all KV has its memory already. The error says what to lower."""

    def full(model: PreTrainedModel) -> None:
        raise kind("CUDA out of memory. Tried to allocate 20.00 MiB.\nSee the manual.")

    model, settings = random_model(), Settings(device="cuda", compile=mode)  # type: ignore[arg-type]
    monkeypatch.setattr(fusing, "compile_kernels", full)
    why = "takes more memory than cuda has (CUDA out of memory. Tried to allocate 20.00 MiB.)"
    lower = "lower target.kv_pool_tokens, retrieval.budget or max_sequences, or set compile: off"
    remedy = f"to start without this: {lower}"
    if mode == "on":
        with pytest.raises(InvalidValueError) as refused:
            fuse(model, settings)
        assert str(refused.value) == f"compile: 'on' {why}: {lower}"
    else:
        assert not fuse(model, settings)
        lost = "no fused kernels, so passes are slower"
        assert said(caplog) == [f"compile: auto: {lost}, because compile {why}; {remedy}"]
    assert not fused_parts(model)


@pytest.mark.parametrize(
    ("values", "fused"),
    [
        ({}, False),
        ({"compile": "on"}, True),
        ({"device": "cuda"}, True),
        ({"device": "cuda:1", "compile": "off"}, False),
    ],
    ids=str,
)
def test_by_default_models_are_fused_on_cuda(values: dict[str, str], fused: bool) -> None:
    assert Settings.model_validate(values).fused == fused


def test_the_setting_is_read_as_it_is_written(tmp_path: Path) -> None:
    """In YAML a bare `on` is true."""
    path = tmp_path / "settings.yaml"
    path.write_text("compile: on")
    assert load_settings(path).compile == "on"


@pytest.fixture
def no_compiler() -> Iterator[None]:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}):
        yield


def test_without_a_compiler_on_is_refused(no_compiler: None) -> None:
    with pytest.raises(InvalidValueError, match=r"compile: 'on' needs a compiler .*set compile: off") as refused:
        fuse(random_pair().ours, FUSED)
    assert "C++" in str(refused.value), "and what it lacks is said"


def test_without_a_compiler_auto_does_without(no_compiler: None, caplog: pytest.LogCaptureFixture) -> None:
    """The settings are those of a GPU. Only their default for `compile` matters here."""
    with caplog.at_level(logging.WARNING, logger="triforce_core"):
        for seed in range(2):
            model = random_pair(seed=seed).ours
            assert not fuse(model, Settings(device="cuda"))
            assert not fused_parts(model)
            assert ordinary_logits(model, 3).isfinite().all()
    [message] = said(caplog)
    lost = "no fused kernels, so passes are slower"
    assert message.startswith(f"compile: auto: {lost}, because compile needs a compiler that works on cuda (")
    assert message.endswith("); to start without this: set compile: off")
