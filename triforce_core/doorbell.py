"""How several threads wake the one that drives a tier."""

from __future__ import annotations

import queue
import time


class Doorbell:
    """Whoever leaves something for the driving thread rings; that thread, between looks at all its inboxes, waits.

    A ring between two waits is never lost: the second returns at once.
    """

    def __init__(self) -> None:
        self.rings: queue.SimpleQueue[None] = queue.SimpleQueue()  # half the price of a threading.Event
        self.woken = time.monotonic()  # when the driving thread last stopped waiting

    def ring(self) -> None:
        """From any thread."""
        if self.rings.empty():  # otherwise a ring is pending: the thread that takes it looks at all inboxes afterwards
            self.rings.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until it rings, at most `timeout_s` seconds, and return whether it rang. Clears pending rings."""
        rang = False
        if timeout_s > 0:
            try:
                self.rings.get(timeout=timeout_s)
                rang = True
            except queue.Empty:
                pass
        while not self.rings.empty():
            self.rings.get_nowait()
        self.woken = time.monotonic()
        return rang
