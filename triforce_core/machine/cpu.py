"""Name, vendor and instruction sets of this machine's CPU, as Linux reports them (empty elsewhere), and how many of its
cores this process may use.

Does not load torch.
"""

import math
import os
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # in a container, what its cgroup may use: microseconds, of each so many
# Flags that decide how fast matrix products are.
TELLING = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The CPU's flags, as Linux names them; empty on other systems."""
    return frozenset((_values(cpuinfo, "flags") + " " + _values(cpuinfo, "Features")).split())


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    return _values(cpuinfo, "model name")


def cpu_vendor(cpuinfo: Path = CPUINFO) -> str:
    """Such as GenuineIntel or AuthenticAMD; empty where Linux names none, as on Arm."""
    return _values(cpuinfo, "vendor_id")


def cpu_summary(cpuinfo: Path = CPUINFO) -> str:
    """One line: the CPU's name and those of its flags that are in `TELLING`."""
    flags = cpu_flags(cpuinfo)
    return f"{cpu_name(cpuinfo) or 'CPU'} ({', '.join(flag for flag in TELLING if flag in flags)})"


def usable_cores(quota: Path = QUOTA) -> int:
    """The cores that this process may use: those that it is restricted to, and no more than its container's limit (of
    cgroups of the second version) or OpenMP's `OMP_THREAD_LIMIT`.
    """
    cores = allowed_cores()
    limit = os.environ.get("OMP_THREAD_LIMIT", "")
    cores = min(cores, max(1, int(limit))) if limit.isdecimal() else cores
    try:
        share, period = quota.read_text(encoding="utf-8").split()
        return cores if share == "max" else min(cores, max(1, math.ceil(int(share) / int(period))))
    except (OSError, ValueError):  # no cgroup, or one of the first version
        return cores


def allowed_cores() -> int:
    """The cores that this process is restricted to, whatever share of their time it has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _values(cpuinfo: Path, name: str) -> str:
    """The value in the first line named `name`; empty if there is none."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    named = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in named if key.strip() == name), "")
