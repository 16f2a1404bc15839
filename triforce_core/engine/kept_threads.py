"""The best numbers of CPU threads, measured once per machine and settings and kept in a file of the user's cache
folder.
"""

import hashlib
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from filelock import AsyncFileLock, FileLock, Timeout
from platformdirs import user_cache_path

import triforce_core
from triforce_core.config import Settings
from triforce_core.models.cpu import cpu_flags, cpu_name
from triforce_core.models.threads import ALL_THREADS

log = logging.getLogger(__name__)

TURN_S = 300.0  # longest wait for other processes that measure
IRRELEVANT = {"server", "threads", "max_sequences"}  # settings that do not change which threads are best


def kept_file() -> Path:
    return user_cache_path("triforce-serve") / "threads.json"


@asynccontextmanager
async def measuring() -> AsyncIterator[None]:
    """Hold the lock under which one process of this user measures: two at once would disturb each other's times."""
    file = kept_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = await AsyncFileLock(file.with_suffix(".measuring")).acquire(timeout=TURN_S)
    except (OSError, Timeout) as error:  # at worst the chosen threads are not the best ones
        log.warning("threads are measured without waiting for others: %s", error)
        yield
        return
    async with lock:
        yield


def kept_threads(settings: Settings, tier: str) -> int | None:
    """The tier's best number of threads on this machine, if it was measured."""
    threads = read(kept_file()).get(key(settings, tier))
    return threads if isinstance(threads, int) and 1 <= threads <= ALL_THREADS else None


def keep_threads(settings: Settings, tier: str, threads: int) -> None:
    """Keep the number for the next start. If the folder cannot be written to, the next start measures again."""
    file = kept_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):
            fresh = file.with_suffix(".fresh")
            fresh.write_text(json.dumps(read(file) | {key(settings, tier): threads}, indent=1) + "\n", encoding="utf-8")
            fresh.replace(file)
    except OSError as error:
        log.warning("the threads that were measured cannot be kept in %s: %s", file, error)


def read(file: Path) -> dict[str, object]:
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def key(settings: Settings, tier: str) -> str:
    """A key of the tier, the machine, the software and every setting that may change which threads are best."""
    software = [triforce_core.__version__, torch.__version__]
    machine = [cpu_name(), sorted(cpu_flags()), os.cpu_count(), ALL_THREADS, software]
    shape = settings.model_dump(mode="json", exclude=IRRELEVANT)
    digest = hashlib.sha256(json.dumps([machine, shape, tier], sort_keys=True).encode()).hexdigest()
    return f"{tier}-{digest[:16]}"
