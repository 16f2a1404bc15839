"""Which cores of its node a process keeps to, and how deeply they may sleep."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

from triforce_core.errors import InvalidValueError, require

CPU_LATENCY = Path("/dev/cpu_dma_latency")


def keep_to(cores: Sequence[int], field: str) -> None:
    """Run this process on these cores of its node only. Threads to come inherit it."""
    allowed = os.sched_getaffinity(0)
    require(allowed.issuperset(cores), field, list(cores), f"must be among the cores of its node, {sorted(allowed)}")
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)


def keep_awake(latency_us: int | None) -> FileIO | None:
    """Ask Linux that cores of this node enter no idle state that takes longer than this to leave: 0, none at all.

    The least that anybody asks for holds, for all cores, until the file returned here is closed or its process ends
    (https://docs.kernel.org/admin-guide/pm/cpuidle.html, "Power Management Quality of Service for CPUs"). None asks for
    nothing. Raises `InvalidValueError` where this process may not ask.
    """
    if latency_us is None:
        return None
    try:
        request = CPU_LATENCY.open("r+b", buffering=0)  # never makes the file
        request.write(struct.pack("i", latency_us))
    except OSError as error:
        rule = f"cannot be asked of its node: {error}; leave it out, or let the tier write there"
        raise InvalidValueError("placement.cpu_latency_us", latency_us, rule) from None
    return request
