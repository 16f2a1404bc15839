"""How several threads wake the one that drives a tier."""

from __future__ import annotations

import threading


class Doorbell:
    """Whoever leaves something for the driving thread rings; that thread, between looks at all its inboxes, waits.

    A ring between two waits is never lost: the second returns at once.
    """

    def __init__(self) -> None:
        self.rung = threading.Event()

    def ring(self) -> None:
        """From any thread."""
        self.rung.set()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until it rings, at most `timeout_s` seconds; returns whether it did."""
        rang = timeout_s > 0 and self.rung.wait(timeout_s)
        self.rung.clear()
        return rang
