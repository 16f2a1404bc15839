"""The device's peak rates: copying, matrix products, and transfers from the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

REPEATS = 7


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured peak rates of a device."""

    copy_gb_s: float  # device to device, bytes read and bytes written
    host_link_gb_s: float | None  # pinned host memory to device; None: the device is the host
    matrix_tflops: float  # of one large matrix product in the dtype of the weights


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """The peak rates as medians over a few repeats, with large tensors on CUDA and small ones elsewhere. Their memory
    is given back, because a model that fills the device follows.
    """
    peaks = measured(device, dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return peaks


def measured(device: torch.device, dtype: torch.dtype) -> Peaks:
    large = device.type == "cuda"
    count, side = (2**30, 8192) if large else (2**26, 256)
    source = torch.ones(count, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    copying = seconds(lambda: into.copy_(source), device)
    link = None
    if large:
        host = torch.ones(count // 4, dtype=torch.uint8).pin_memory()
        link = len(host) / seconds(lambda: into[: len(host)].copy_(host, non_blocking=True), device) / 1e9
    left = torch.randn(side, side, device=device).to(dtype)
    out = torch.empty_like(left)
    multiplying = seconds(lambda: torch.mm(left, left, out=out), device)
    return Peaks(2 * count / copying / 1e9, link, 2 * side**3 / multiplying / 1e12)


def seconds(run: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Median seconds of `run`, including the work that it starts on the device, after one warm-up run."""
    taken = []
    for _ in range(repeats + 1):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
