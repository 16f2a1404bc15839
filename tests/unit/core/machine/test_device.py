"""Devices that are not here, and number formats that a device lacks, are refused before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from triforce_core.errors import InvalidValueError
from triforce_core.machine.device import check_dtype, torch_device
from triforce_core.models.load import load_model


class Gpus:
    """What PyTorch says of GPUs that this machine does not have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")


def test_devices_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, count=2)
    for name in ("cpu", "cuda", "cuda:0", "cuda:1"):
        assert str(torch_device(name)) == name


@pytest.mark.parametrize(
    ("name", "count", "named"),
    [
        ("nowhere", 2, ["'nowhere'", "must be cpu, cuda or cuda:N"]),
        ("meta", 2, ["'meta'", "must be cpu, cuda or cuda:N"]),
        ("cuda", 0, ["'cuda'", "needs a GPU", "sees none"]),
        ("cuda:2", 2, ["'cuda:2'", "must be below cuda:2", "PyTorch sees 2"]),
    ],
)
def test_devices_that_are_not(name: str, count: int, named: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, count)
    with pytest.raises(InvalidValueError) as refusal:
        load_model("demo", "target", "float32", name)
    for part in ("device", *named):
        assert part in str(refusal.value)


def test_bfloat16_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, count=1, capability=(7, 5))
    with pytest.raises(InvalidValueError) as refusal:
        load_model("demo", "target", "bfloat16", "cuda")
    for part in ("dtype", "'bfloat16'", "8.0", "Tesla T4", "has 7.5", "set dtype: float16"):
        assert part in str(refusal.value)
    for dtype in ("float16", "float32"):
        check_dtype(dtype, torch.device("cuda"))
    check_dtype("bfloat16", torch.device("cpu"))
    Gpus(monkeypatch, count=1, capability=(8, 0))
    check_dtype("bfloat16", torch.device("cuda"))
