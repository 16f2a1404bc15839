"""When the tiers of this process were at work: off until a benchmark asks for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from triforce_core.messages import Tier

MAX_STAGES = 200_000  # the oldest are dropped: whoever records asks now and then


class Stage(NamedTuple):
    """One piece of a tier's work. Times are of the monotonic clock, which the processes of a machine share."""

    tier: Tier
    start: float  # seconds
    stop: float
    cpu: float  # seconds that the tier's thread had a core; less than stop - start where it shares one
    batch: int  # sequences
    tokens: int  # positions whose logits were wanted, in all sequences together; prompt chunks have none


class Timeline:
    """Filled by the thread that drives a tier; may be asked by any."""

    def __init__(self) -> None:
        self.recording = False
        self.stages: deque[Stage] = deque(maxlen=MAX_STAGES)

    @contextmanager
    def stage(self, tier: Tier, batch: int, tokens: int) -> Iterator[None]:
        """The body is one stage."""
        if not self.recording:
            yield
            return
        start, cpu = time.monotonic(), time.thread_time()
        yield
        self.stages.append(Stage(tier, start, time.monotonic(), time.thread_time() - cpu, batch, tokens))

    def start(self) -> None:
        self.recording = True

    def take(self) -> list[Stage]:
        """What was recorded since the last call."""
        return [self.stages.popleft() for _ in range(len(self.stages))]


TIMELINE = Timeline()


def start_recording() -> None:
    """In this process."""
    TIMELINE.start()


def take_stages() -> list[tuple[int, float, float, float, int, int]]:
    """Of this process, since the last call, as plain values."""
    return [(int(s.tier), *s[1:]) for s in TIMELINE.take()]
