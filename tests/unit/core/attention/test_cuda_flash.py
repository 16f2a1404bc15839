"""FlashAttention as far as it goes without a GPU: how calls are put together, what is declared, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.unit.core.attention.test_attention import HEAD_DIM, pool_views, textbook
from triforce_core.attention import KERNELS, kernel_for, ranged_for
from triforce_core.attention.base import Partial
from triforce_core.attention.cuda_flash import cuda_flash, past_and_own
from triforce_core.attention.flash_decoding import triton_ranged
from triforce_core.attention.ranged import WorkItems, gathered
from triforce_core.attention.reference import reference
from triforce_core.config import Settings
from triforce_core.errors import InvalidValueError


def square_only(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    """What libraries agree on: with as many keys as queries there is but one causal order."""
    assert not causal or query.shape[1] == keys.shape[1]
    assert causal or query.shape[0] == keys.shape[0], "KV would be read once a head"
    return reference(query, keys, values, scale, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("queries", "past"), [(1, 0), (1, 300), (2, 0), (9, 1), (70, 300)])
def test_past_and_own_tokens_are_the_textbooks(queries: int, past: int, kv_heads: int, causal: bool) -> None:
    query = torch.randn(4, queries, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    keys, values = pool_views(kv_heads, past + queries, torch.float32, seed=1)
    part = past_and_own(square_only, query, keys, values, 0.3, causal)
    output, lse = textbook(query, keys, values, 0.3, causal)
    torch.testing.assert_close(part.output.double(), output, atol=1e-5, rtol=0)
    torch.testing.assert_close(part.lse.double(), lse, atol=1e-4, rtol=0)


@pytest.mark.parametrize("queries", [1, 5, 300])
@pytest.mark.parametrize("causal", [False, True])
def test_the_operator_is_called_as_pytorch_declares_it(queries: int, causal: bool) -> None:
    """On shapes without data: arguments are checked, and what comes out has the shapes of a kernel's."""
    query, pool = torch.empty(4, queries, 64, dtype=torch.bfloat16, device="meta"), empty_pool()
    part = cuda_flash(query, pool[0][:, 50:850], pool[1][:, 50:850], 0.1, causal)
    assert (part.output.shape, part.output.dtype) == ((4, queries, 64), torch.bfloat16)
    assert (part.lse.shape, part.lse.dtype) == ((4, queries), torch.float32)


@pytest.mark.parametrize("queries", [1, 7])
def test_the_operator_over_ranges_is_called_as_it_declares(queries: int) -> None:
    """On a GPU's tensors without data, of which mixed devices and any value that is asked for raise."""
    cuda = torch.device("cuda", 0)
    with FakeTensorMode():
        items = WorkItems(
            *(torch.empty(count, dtype=torch.int32, device=cuda) for count in (3, 3)), longest=900, splits=3
        )
        query = torch.empty(3, queries, 2, 64, dtype=torch.bfloat16, device=cuda)
        keys, values = torch.empty(2, 2, 900, 64, dtype=torch.bfloat16, device=cuda).unbind()
        part = triton_ranged(query, keys, values, 0.1, items)
    assert (part.output.shape, part.output.dtype) == ((3, queries, 2, 64), torch.bfloat16)
    assert (part.lse.shape, part.lse.dtype) == ((2, 3, queries), torch.float32)
    assert part.output.device == part.lse.device == cuda


def empty_pool() -> tuple[Tensor, Tensor]:
    pool = torch.empty(2, 2, 900, 64, dtype=torch.bfloat16, device="meta")
    return pool[0], pool[1]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a test sets of a machine that is not this one."""
    has: dict[str, Any] = {"flash_attn": None, "capability": (9, 0)}
    monkeypatch.setattr("triforce_core.attention.find_spec", has.get)
    monkeypatch.setattr("triforce_core.attention.import_module", has.get)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: has["capability"])
    return has


@pytest.mark.parametrize(
    ("settings", "head_dim", "kernel"),
    [
        ({}, 64, "cpu_flash"),
        ({"device": "cuda:1"}, 64, "cuda_flash"),
        ({"device": "cuda", "dtype": "float16"}, 256, "cuda_flash"),
        ({"device": "cuda", "dtype": "float32"}, 100, "blocked"),
        ({"device": "cuda", "attention": "reference"}, 100, "reference"),
        ({"attention": "blocked"}, 100, "blocked"),
    ],
    ids=str,
)
def test_the_kernel_of_device_and_dtype(
    settings: dict[str, str], head_dim: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Settings.model_validate(settings)
    assert kernel_for(made, head_dim) is KERNELS[kernel]
    for runs in (True, False):
        monkeypatch.setattr("triforce_core.attention.can_run", lambda device, runs=runs: runs)
        assert ranged_for(made) is (triton_ranged if runs and kernel == "cuda_flash" else gathered)


def test_the_package_is_taken_where_it_is_installed(machine: dict[str, Any]) -> None:
    machine["flash_attn"] = SimpleNamespace(flash_attn_func=print)
    assert kernel_for(Settings(device="cuda"), 64) is KERNELS["flash_attn"]


def test_a_package_of_that_name_without_the_function_is_not_taken(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn-4 may be installed alone, or in a build for another PyTorch."""
    machine["flash_attn"] = SimpleNamespace()
    assert kernel_for(Settings(device="cuda"), 64) is KERNELS["cuda_flash"]
    with pytest.raises(InvalidValueError, match="attention: 'flash_attn' is not installed with flash_attn_func"):
        kernel_for(Settings(device="cuda", attention="flash_attn"), 64)

    def broken(name: str) -> None:
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr("triforce_core.attention.import_module", broken)
    assert kernel_for(Settings(device="cuda"), 64) is KERNELS["cuda_flash"]


@pytest.mark.parametrize(
    ("settings", "head_dim", "named"),
    [
        ({"attention": "fast"}, 64, ["'fast'", "must be one of cpu_flash, reference"]),
        ({"attention": "cuda_flash"}, 64, ["'cuda_flash'", "runs on CUDA", "device is cpu"]),
        ({"attention": "cpu_flash", "device": "cuda"}, 64, ["'cpu_flash'", "runs on the CPU", "device is cuda"]),
        ({"attention": "flash_attn", "device": "cuda"}, 64, ["'flash_attn'", "is not installed", "cuda_flash"]),
        (
            {"attention": "cuda_flash", "device": "cuda", "dtype": "float32"},
            64,
            ["'cuda_flash'", "bfloat16 and float16", "dtype is float32", "set attention: blocked"],
        ),
        ({"device": "cuda"}, 100, ["'cuda_flash'", "multiple of 8", "heads have 100", "set attention: blocked"]),
        ({"device": "cuda"}, 264, ["'cuda_flash'", "up to 256", "heads have 264", "set attention: blocked"]),
    ],
    ids=str,
)
def test_a_kernel_that_cannot_work_is_refused(settings: dict[str, str], head_dim: int, named: list[str]) -> None:
    with pytest.raises(InvalidValueError) as refusal:
        kernel_for(Settings.model_validate(settings), head_dim)
    for part in ("attention", *named):
        assert part in str(refusal.value)


def test_a_gpu_that_is_too_old_is_refused(machine: dict[str, Any]) -> None:
    settings = Settings(device="cuda:1", dtype="float16")
    machine["capability"] = (7, 5)
    with pytest.raises(InvalidValueError) as refusal:
        kernel_for(settings, 64)
    for part in ("attention", "'cuda_flash'", "8.0", "cuda:1 has 7.5", "set attention: blocked"):
        assert part in str(refusal.value)
    machine["capability"] = (8, 0)
    assert kernel_for(settings, 64) is KERNELS["cuda_flash"]
