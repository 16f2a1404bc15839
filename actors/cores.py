"""Which cores of its node a process keeps to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from triforce_core.errors import require


def keep_to(cores: Sequence[int], field: str) -> None:
    """Run this process on these cores of its node only. Threads to come inherit it."""
    allowed = os.sched_getaffinity(0)
    require(allowed.issuperset(cores), field, list(cores), f"must be among the cores of its node, {sorted(allowed)}")
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)
