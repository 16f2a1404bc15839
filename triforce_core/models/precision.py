"""Which precision a machine computes well with: what `dtype: auto` stands for. Loads no torch.

Without instructions of its own for it, a CPU multiplies bfloat16 many times slower than float32.
"""

from __future__ import annotations

from pathlib import Path

from triforce_core.config import Settings
from triforce_core.models.cpu import CPUINFO, cpu_flags

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of Intel and AMD; the last of Arm


def machine_dtype(device_type: str, cpuinfo: Path = CPUINFO) -> str:
    """Of this machine's CPU, or of CUDA, where too old a GPU is refused when the model is loaded."""
    fast = device_type == "cuda" or BFLOAT16_FLAGS & cpu_flags(cpuinfo)
    return "bfloat16" if fast else "float32"


def resolved(settings: Settings) -> Settings:
    """The settings with the precision of this machine where they say `dtype: auto`."""
    if settings.dtype != "auto":
        return settings
    return settings.model_copy(update={"dtype": machine_dtype(settings.device_type)})
