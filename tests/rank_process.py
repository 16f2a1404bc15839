"""A process that is rank 1 of one group after another. Starting a process for every group would cost seconds each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from triforce_core.config import Settings
from triforce_core.models.rank_group import Leader, Rendezvous


class RankProcess:
    """The process ends when this object is closed, or when the process that made it ends."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.calls, theirs = context.Pipe()
        self.process = context.Process(target=follow_each, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    @contextmanager
    def lead(self, settings: Settings, tiers: tuple[str, ...]) -> Iterator[Leader]:
        """Lead a group of two ranks that hold these tiers: this process is rank 0, and the started process is
        rank 1.
        """
        if not self.process.is_alive():  # a test before this one has failed
            self.start()
        rendezvous = Rendezvous(2)
        self.calls.send((settings, tiers, rendezvous.endpoint(1)))
        leader = rendezvous.lead(settings.device)
        try:
            yield leader
            leader.stop()
        finally:
            leader.close()

    def close(self) -> None:
        self.calls.close()
        self.process.join(10)
        assert self.process.exitcode == 0


def follow_each(calls: Connection) -> None:
    from triforce_core.building.followers import follow

    while True:
        try:
            arguments = calls.recv()
        except EOFError:
            return
        follow(*arguments)
