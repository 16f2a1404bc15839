"""Attention kernels, one backend a file. A kernel attends to one range of keys; `merge` joins the ranges of a row."""

from triforce_core.attention.base import Kernel, Partial, merge
from triforce_core.attention.cpu_flash import cpu_flash
from triforce_core.attention.reference import reference

KERNELS: dict[str, Kernel] = {"cpu_flash": cpu_flash, "reference": reference}


def default_kernel(device_type: str) -> str:
    """The fastest kernel that runs on a device of this type, by name."""
    return "cpu_flash" if device_type == "cpu" else "reference"


__all__ = ["KERNELS", "Kernel", "Partial", "default_kernel", "merge"]
