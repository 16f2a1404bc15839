"""The conditions under which a benchmark may run: alone, on a quiet machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from triforce_core.errors import InvalidValueError, UnavailableError

LOCK = Path(tempfile.gettempdir()) / "triforce-bench.lock"


@contextmanager
def quiet_machine(max_load: float, *, force: bool) -> Iterator[None]:
    """Hold the machine-wide benchmark lock; refuse when the load average is above `max_load`, unless forced."""
    load = os.getloadavg()[0]
    if load > max_load and not force:
        rule = f"is above --max-load {max_load:g}: wait, raise it, or --force"
        raise InvalidValueError("load average", round(load, 2), rule)
    lock = FileLock(LOCK, mode=0o666)
    try:
        with lock.acquire(timeout=0):
            yield
    except Timeout:
        raise UnavailableError(f"another benchmark holds {LOCK}: two at once would measure each other") from None
