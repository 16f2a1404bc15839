"""Numbers from the host to a device, without the host waiting until they are there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def staged(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the host, in memory that `device` can copy from while the host goes on."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")


def on_device(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Tensor:
    """On `device`, by one copy; work that is queued there afterwards finds it done."""
    return staged(numbers, dtype, device).to(device, non_blocking=True)
