"""Ends what a server would leave behind: some of Ray's processes outlive one that is killed, and a signal may come just
when the server starts a process.

A small process waits for the end of the server, which it sees by a pipe, and then kills all processes that have the
server's mark in their environment.
"""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

MARK = "TRIFORCE_RUN"  # in the environment of the server and of all that it starts
DONE = b"done"
GRACE_S, PATIENCE_S = 5.0, 30.0  # for processes to end by themselves; for those that are killed to be gone


@contextmanager
def nothing_remains() -> Iterator[None]:
    """Whatever this process starts inside the context ends with the context, or soon after this process is killed."""
    mark = os.environ[MARK] = secrets.token_hex(8)
    command = [sys.executable, "-m", __name__, mark]
    # In a session of its own, so that Ctrl-C in a terminal does not end it with the server.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as guard:
        assert guard.stdin is not None
        try:
            yield
        finally:
            with suppress(BrokenPipeError):  # somebody has ended it
                guard.stdin.write(DONE)
                guard.stdin.flush()
            del os.environ[MARK]


def marked(mark: str) -> list[psutil.Process]:
    """The processes of this user with this mark, but for the calling one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def main(mark: str) -> None:
    if sys.stdin.buffer.read() != DONE:
        psutil.wait_procs(marked(mark), timeout=GRACE_S)
    end(mark)


def end(mark: str) -> None:
    """Kill the processes with this mark."""
    until = time.monotonic() + PATIENCE_S
    while (left := marked(mark)) and time.monotonic() < until:  # those that are killed may have started others
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)


if __name__ == "__main__":
    main(sys.argv[1])
