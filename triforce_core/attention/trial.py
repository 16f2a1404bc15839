"""Whether our kernels in Triton work on a device: they are tried once."""

import logging
from functools import cache
from importlib.util import find_spec

import torch

from triforce_core.attention.chunk_sums import fused
from triforce_core.attention.flash_decoding import attention
from triforce_core.machine.toolchain import lacking

log = logging.getLogger(__name__)


@cache
def can_run(device: torch.device) -> bool:
    """Whether Triton, which PyTorch for CUDA brings along, works on this device. If not, the log says why, once."""
    why = "Triton is not installed" if find_spec("triton") is None else lacking("cuda")
    if why is None:
        why = failure(device)
    if why is not None:
        log.warning("%s: long contexts are read with PyTorch's operators, which is slower", why)
    return why is None


def failure(device: torch.device) -> str | None:
    """Why a kernel fails on the device: a compiler or a driver that is broken may raise anything."""
    try:
        some = torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16, device=device)
        starts, lengths = (torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in ([0], [1]))
        attention(some, some[0], some[0], 1.0, starts, lengths)
        fused(some[0], some[0], 1.0, 1, 1, 1)
    except Exception as error:
        reason = str(error).strip().rpartition("\n")[2]
        return f"Triton fails on {device} ({type(error).__name__}: {reason})"
    return None
