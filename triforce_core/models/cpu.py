"""What this machine's CPU is and can do, as Linux tells it; nothing is known elsewhere. Loads no torch."""

from __future__ import annotations

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
TELLING = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")  # flags that decide how fast products are


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """In Linux's words."""
    return frozenset((_values(cpuinfo, "flags") + " " + _values(cpuinfo, "Features")).split())


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    return _values(cpuinfo, "model name")


def cpu_summary() -> str:
    """For benchmarks: its name, and those of its flags that make the difference."""
    flags = cpu_flags()
    return f"{cpu_name() or 'CPU'} ({', '.join(flag for flag in TELLING if flag in flags)})"


def _values(cpuinfo: Path, name: str) -> str:
    """What the first line of this name says."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    named = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in named if key.strip() == name), "")
