"""When a failed attempt is followed by another, and how long after it."""

from __future__ import annotations

import random
import time

from triforce_core.client.errors import CallError, OverloadedError, UnavailableError

RETRIED = (UnavailableError, OverloadedError)
FIRST_DELAY_S, MAX_DELAY_S = 0.25, 5.0


class Attempts:
    """The attempts of one call: one, and up to `retries` more in a row, all within `timeout_s` seconds from now."""

    def __init__(self, timeout_s: float | None, retries: int) -> None:
        self.until = None if timeout_s is None else time.monotonic() + timeout_s
        self.retries = retries
        self.failed = 0

    @property
    def left_s(self) -> float | None:
        """Seconds that are left for the next attempt; None: no limit."""
        return None if self.until is None else max(self.until - time.monotonic(), 0.001)

    def got_on(self) -> None:
        """The call has made progress, so later failures are counted from 0."""
        self.failed = 0

    def delay_s(self, error: CallError) -> float | None:
        """Seconds to wait before the next attempt; None if this error is final.

        The delay doubles with each failure. It is shortened at random, by up to half, so that clients that failed
        together do not retry together.
        """
        if not isinstance(error, RETRIED) or self.failed == self.retries:
            return None
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2**self.failed) * random.uniform(0.5, 1)
        self.failed += 1
        return delay_s if self.left_s is None or delay_s < self.left_s else None
