"""Ends a server whose Ray has died."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from deploy.remains import MARK, end

RAY_ITSELF = ("gcs_server", "raylet")  # a raylet ends with each of its agents
CHECK_S = 1.0


@contextmanager
def ends_with_ray(logs: Path) -> Iterator[None]:
    """Inside the context, end this process and all that it has started soon after Ray has died: nothing works without
    Ray, and calls of Ray or Serve, those that stop them included, may then wait for ever.
    """
    over = threading.Event()
    ray = {each.name(): each for each in psutil.Process().children() if each.name() in RAY_ITSELF}

    def has_ended(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        return True

    def watch() -> None:
        while not over.wait(CHECK_S):
            for name in filter(lambda name: has_ended(ray[name]), ray):
                try:
                    print(f"triforce: Ray has died: its {name} has ended; see {logs}", file=sys.stderr, flush=True)
                    end(os.environ[MARK])
                finally:  # also where nobody reads standard error any more
                    os._exit(1)

    watcher = threading.Thread(target=watch, name="ray-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
