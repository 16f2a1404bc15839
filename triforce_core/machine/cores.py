"""Restricts a process to cores of its node, and limits how deeply the node's cores may sleep."""

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

from triforce_core.errors import InvalidValueError, require

CPU_LATENCY = Path("/dev/cpu_dma_latency")


def keep_to(cores: Sequence[int], field: str) -> None:
    """Run this process, with threads created later, on these cores only. Raises `InvalidValueError`, naming `field`."""
    allowed = os.sched_getaffinity(0)
    require(allowed.issuperset(cores), field, list(cores), f"must be among the cores of its node, {sorted(allowed)}")
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread), cores)


def keep_awake(latency_us: int | None) -> FileIO | None:
    """Ask Linux to keep the node's cores out of idle states that take longer than `latency_us` to leave (0: of all;
    None: nothing is asked), until the returned file is closed or its process ends; the lowest of all requests holds
    (https://docs.kernel.org/admin-guide/pm/cpuidle.html). Raises `InvalidValueError` if this process may not ask.
    """
    if latency_us is None:
        return None
    try:
        request = CPU_LATENCY.open("r+b", buffering=0)  # this mode never creates the file
        request.write(struct.pack("i", latency_us))
    except OSError as error:
        rule = f"cannot be asked of its node: {error}; leave it out, or let the tier write there"
        raise InvalidValueError("placement.cpu_latency_us", latency_us, rule) from None
    return request
