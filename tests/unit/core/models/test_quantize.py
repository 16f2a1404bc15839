"""Quantised weights: what is refused and why, what stays as it was, and that nothing is said of it on the way."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.command_line import Refusals
from tests.random_models import random_model
from triforce_core.config import load_settings
from triforce_core.errors import InvalidValueError
from triforce_core.models import files
from triforce_core.models.quantize import Quantization, quantize_weights, say_if_slower, weight_bytes


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "bfloat16"), ("cuda", "float32")])
def test_int4_says_what_it_needs(device: str, dtype: str) -> None:
    with pytest.raises(InvalidValueError) as refusal:
        load_settings(device=device, dtype=dtype, retrieval={"quantization": "int4"})
    assert "retrieval.quantization int4 needs device cuda and dtype bfloat16" in str(refusal.value)
    assert f"device {device} and dtype {dtype}" in str(refusal.value)
    load_settings(device="cuda", dtype="bfloat16", retrieval={"quantization": "int4"})


def test_what_torchao_cannot_do_is_one_of_our_errors() -> None:
    with pytest.raises(InvalidValueError, match=r"retrieval\.quantization: 'int4' fails with torch\.float32 on cpu \("):
        quantize_weights(random_model(hidden_size=128), "int4")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, refusals: Refusals) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    named = ["retrieval.quantization", "'int8'", "needs the package torchao"]
    refusals.check(named, "generate", "--prompt-file", __file__, "--self-drafter-quantization", "int8")


def test_weights_that_are_slower_here_are_named_with_their_times(caplog: pytest.LogCaptureFixture) -> None:
    """Where a GPU has no good kernel for them, memory is all that they save."""
    with caplog.at_level(logging.WARNING, logger="triforce_core"):
        say_if_slower("int8", before=25e-6, after=20e-6)
        assert not caplog.records, "they are a gain"
        say_if_slower("int8", before=25e-6, after=41.4e-6)
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("retrieval.quantization: int8 is slower on this device: 4 tokens take 41 µs")
    assert "25 µs unquantised" in message
    assert message.endswith("; int4 may be faster")
    with caplog.at_level(logging.WARNING, logger="triforce_core"):
        say_if_slower("int4", before=25e-6, after=41.4e-6)
    assert caplog.messages[-1].endswith("It saves memory only"), "nothing has fewer bits"


def test_the_settings_of_the_process_stay() -> None:
    """These are the settings of torch's compiler, and how float32 products are rounded, which concerns the
    target, too.
    """
    from torch._inductor import config as inductor

    before = inductor.coordinate_descent_tuning, torch.get_float32_matmul_precision()
    quantize_weights(random_model(), "int8")
    quantize_weights(random_model(), "fp8")
    assert (inductor.coordinate_descent_tuning, torch.get_float32_matmul_precision()) == before


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_head_and_norms_stay(tied: bool) -> None:
    model = random_model(tie_word_embeddings=tied)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    size = weight_bytes(model)
    quantize_weights(model, "int8")
    changed = [name for name, weight in model.named_parameters() if type(weight.data) is not torch.Tensor]
    assert changed == [name for name in before if name.endswith("_proj.weight")]
    for name, weight in model.named_parameters():
        if name in changed:
            error = weight.dequantize() - before[name]
            assert error.norm() < 0.02 * before[name].norm()
        else:
            assert torch.equal(weight, before[name])
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    assert (head.weight is model.get_input_embeddings().weight) == tied
    assert weight_bytes(model) < 0.6 * size


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rows_of_zeros_stay_finite(kind: Quantization) -> None:
    """Trained models have some: heads that nobody needs."""
    model = random_model()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[3:9] = 0
    before = model(torch.tensor([[1, 2, 3]])).logits
    quantize_weights(model, kind)
    after = model(torch.tensor([[1, 2, 3]])).logits
    assert (after - before).norm() < 0.2 * before.norm()


@pytest.mark.slow
def test_importing_it_says_nothing() -> None:
    """A refused command prints one line; the libraries beneath would add theirs."""
    command = [sys.executable, "-c", "import triforce_core.building.loading, torchao"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout + done.stderr == ""
