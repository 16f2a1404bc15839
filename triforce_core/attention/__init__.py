"""Attention kernels, one backend per file. A kernel attends to one range of keys; `merge` joins the ranges of a row."""

from importlib import import_module
from importlib.util import find_spec

import torch

from triforce_core.attention.base import Kernel, Partial, Scoring, merge
from triforce_core.attention.chunk_sums import ChunkSums, torch_chunk_sums, triton_chunk_sums
from triforce_core.attention.cpu_flash import cpu_flash
from triforce_core.attention.cuda_flash import HEAD_DIM_STEP, MAX_HEAD_DIM, cuda_flash, flash_attn
from triforce_core.attention.flash_decoding import triton_ranged
from triforce_core.attention.ranged import Ranged, gathered
from triforce_core.attention.reference import blocked, reference
from triforce_core.attention.tree import over_tree, tree_mask
from triforce_core.attention.trial import can_run
from triforce_core.config import Settings
from triforce_core.errors import require

KERNELS: dict[str, Kernel] = {
    "cpu_flash": cpu_flash,
    "reference": reference,
    "blocked": blocked,
    "cuda_flash": cuda_flash,
    "flash_attn": flash_attn,
}
ON_CUDA = ("cuda_flash", "flash_attn")


def default_kernel(device_type: str, dtype: str) -> str:
    """The default kernel: FlashAttention, or `blocked` for float32 on a GPU, where that has 16-bit dtypes only."""
    if device_type == "cpu":
        return "cpu_flash"
    if dtype == "float32":
        return "blocked"
    return "flash_attn" if has_flash_attn() else "cuda_flash"


def has_flash_attn() -> bool:
    """Whether the package `flash-attn` is installed and has the function that the kernel calls. `flash-attn-4` installs
    a package of the same name without it, and a build for another PyTorch fails to import.
    """
    if find_spec("flash_attn") is None:
        return False
    try:
        return hasattr(import_module("flash_attn"), "flash_attn_func")
    except (ImportError, OSError, RuntimeError):
        return False


def kernel_name(settings: Settings) -> str:
    return settings.attention or default_kernel(settings.device_type, settings.dtype)


def check_kernel(settings: Settings, head_dim: int) -> None:
    """Raise `InvalidValueError` unless the kernel of the settings supports their device, their dtype and `head_dim`."""
    name = kernel_name(settings)
    require(name in KERNELS, "attention", name, f"must be one of {', '.join(KERNELS)}")
    if name == "cpu_flash":
        require(settings.device_type == "cpu", "attention", name, f"runs on the CPU, and device is {settings.device}")
    if name not in ON_CUDA:
        return
    require(settings.device_type == "cuda", "attention", name, f"runs on CUDA, and device is {settings.device}")
    rule = f"takes bfloat16 and float16, and dtype is {settings.dtype}: set attention: blocked"
    require(settings.dtype != "float32", "attention", name, rule)
    rule = f"takes heads of a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, and the model's heads have {head_dim}"
    fits = head_dim % HEAD_DIM_STEP == 0 and head_dim <= MAX_HEAD_DIM
    require(fits, "attention", name, f"{rule}: set attention: blocked")


def kernel_for(settings: Settings, head_dim: int) -> Kernel:
    """The kernel that the settings name, or the default. Call it on the machine that runs the kernel.

    Raises `InvalidValueError` as `check_kernel`, and for a missing package or a GPU that is too old.
    """
    check_kernel(settings, head_dim)
    name = kernel_name(settings)
    if name in ON_CUDA:
        rule = "is not installed with flash_attn_func (pip install flash-attn); attention: cuda_flash is PyTorch's own"
        require(name != "flash_attn" or has_flash_attn(), "attention", name, rule)
        has = torch.cuda.get_device_capability(settings.device)
        rule = f"needs a GPU of compute capability 8.0 or more, and {settings.device} has {has[0]}.{has[1]}"
        require(has >= (8, 0), "attention", name, f"{rule}: set attention: blocked")
    return KERNELS[name]


def ranged_for(settings: Settings) -> Ranged:
    """The attention of passes of constant shape, over ranges given as tensors (ranged.py)."""
    if kernel_name(settings) not in ON_CUDA:
        return gathered
    return triton_ranged if can_run(torch.device(settings.device)) else gathered


def chunk_sums_for(settings: Settings) -> ChunkSums:
    """How selectors weigh all keys (chunk_sums.py)."""
    if kernel_name(settings) not in ON_CUDA:
        return torch_chunk_sums
    return triton_chunk_sums if can_run(torch.device(settings.device)) else torch_chunk_sums


__all__ = [
    "KERNELS",
    "ON_CUDA",
    "ChunkSums",
    "Kernel",
    "Partial",
    "Ranged",
    "Scoring",
    "check_kernel",
    "chunk_sums_for",
    "default_kernel",
    "gathered",
    "has_flash_attn",
    "kernel_for",
    "merge",
    "over_tree",
    "ranged_for",
    "torch_chunk_sums",
    "tree_mask",
]
