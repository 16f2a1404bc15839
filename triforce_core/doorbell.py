"""A doorbell with which other threads wake the thread that drives a tier."""

import queue
import time


class Doorbell:
    """Other threads ring after they have put something into an inbox of the driving thread, which waits for the ring
    and then looks at all its inboxes.

    A ring between two waits is never lost: the second wait returns at once.
    """

    def __init__(self) -> None:
        self.rings: queue.SimpleQueue[None] = queue.SimpleQueue()  # takes half the time of a threading.Event
        self.woken = time.monotonic()  # when the driving thread last stopped waiting

    def ring(self) -> None:
        """Wake the driving thread; may be called from any thread."""
        if self.rings.empty():  # otherwise a pending ring suffices: all inboxes are looked at after it
            self.rings.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a ring, at most `timeout_s` seconds; clear all rings. Returns whether there was one."""
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
