"""The fast precision of a machine, for which `dtype: auto` stands. Does not load torch.

A CPU without bfloat16 instructions multiplies bfloat16 many times slower than float32.
"""

from pathlib import Path

from triforce_core.config import Settings
from triforce_core.machine.cpu import CPUINFO, cpu_flags

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # the first two: Intel and AMD; the last: Arm


def machine_dtype(device_type: str, cpuinfo: Path = CPUINFO) -> str:
    """The fast precision of this CPU or of CUDA; GPUs too old for it are refused when a model is loaded."""
    fast = device_type == "cuda" or BFLOAT16_FLAGS & cpu_flags(cpuinfo)
    return "bfloat16" if fast else "float32"


def resolved(settings: Settings) -> Settings:
    """The settings, with `dtype: auto` replaced by this machine's precision."""
    if settings.dtype != "auto":
        return settings
    return settings.model_copy(update={"dtype": machine_dtype(settings.device_type)})
