"""Copies of numbers from the host to a device, for which the host does not wait."""

from collections.abc import Sequence

import torch
from torch import Tensor

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def staged(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A host tensor, in pinned memory if `device` is a CUDA device, so that it can be copied asynchronously."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")


def on_device(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor on `device`, by one asynchronous copy, which ends before any work that is queued there later."""
    return staged(numbers, dtype, device).to(device, non_blocking=True)
