"""Tells the owner of a target which requests the target works on, even if the target dies or hangs meanwhile.

The target keeps one byte for each request in shared memory: set while a verifying pass or a snapshot works on the
request, or while its grammar is compiled. The owner, a process on the same machine, reads it after the target's death.
The memory has no name in any file system and goes with the last process that has it open.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable

SLOT = "slot"  # metadata of a call to the target: the request's number
NUM_SLOTS = 1 << 16  # request numbers are taken modulo this; fewer requests are in flight at a time


class Marks:
    """The bytes of all requests. A request's slot is the number that its owner gave it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.bytes = mmap.mmap(fd, NUM_SLOTS)

    @classmethod
    def create(cls) -> Marks:
        """New marks of this process, none of them set."""
        fd = os.memfd_create("triforce-marks")
        os.ftruncate(fd, NUM_SLOTS)
        return cls(fd)

    @classmethod
    def of(cls, path: str) -> Marks:
        """The marks of another process of this user, at the `path` that it named. Raises `OSError`."""
        fd = os.open(path, os.O_RDWR)
        try:
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def put(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.bytes[slot % NUM_SLOTS] = 1

    def take_off(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.bytes[slot % NUM_SLOTS] = 0

    def has(self, slot: int) -> bool:
        return not self.bytes.closed and self.bytes[slot % NUM_SLOTS] == 1

    def any(self) -> bool:
        return not self.bytes.closed and self.bytes.find(b"\x01", 0) >= 0

    def close(self) -> None:
        """May be called again, as a pipeline may be stopped again. By then the descriptor may be another file's."""
        if not self.bytes.closed:
            self.bytes.close()
            os.close(self.fd)
