"""Attention kernels, one backend a file. A kernel attends to one range of keys; `merge` joins the ranges of a row."""

from triforce_core.attention.base import Kernel, Partial, merge
from triforce_core.attention.cpu_flash import cpu_flash
from triforce_core.attention.reference import reference
from triforce_core.config import Settings
from triforce_core.errors import require

KERNELS: dict[str, Kernel] = {"cpu_flash": cpu_flash, "reference": reference}


def default_kernel(device_type: str) -> str:
    """By name. Other devices than the CPU get the reference for now: right, and slow."""
    return "cpu_flash" if device_type == "cpu" else "reference"


def kernel_for(settings: Settings) -> Kernel:
    """The kernel that the settings name, or the default. Raises `InvalidValueError`."""
    name = settings.attention or default_kernel(settings.device.split(":")[0])
    require(name in KERNELS, "attention", name, f"must be one of {', '.join(KERNELS)}")
    return KERNELS[name]


__all__ = ["KERNELS", "Kernel", "Partial", "default_kernel", "kernel_for", "merge"]
