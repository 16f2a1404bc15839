"""Records when the tiers of this process were at work, from the moment when `start_recording` is called in it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from triforce_core.drafting import ModelProposer
from triforce_core.kv.base import Batch, Forward
from triforce_core.messages import Claim, Tier, Verdict
from triforce_core.verification import ModelVerifier

MAX_STAGES = 200_000  # beyond this the oldest stages are dropped; a recorder fetches all from time to time


class Stage(NamedTuple):
    """One piece of a tier's work. Times are read from the monotonic clock, which all processes of a machine share."""

    tier: Tier
    start: float  # seconds
    stop: float
    cpu: float  # seconds of CPU time of the tier's thread; less than stop - start if it waited for a core
    batch: int  # sequences
    tokens: int  # positions at which a token is drawn, over all sequences


class Timeline:
    """Filled by the thread that drives a tier; `start` and `take` may be called from any thread."""

    def __init__(self) -> None:
        self.recording = False
        self.stages: deque[Stage] = deque(maxlen=MAX_STAGES)

    @contextmanager
    def stage(self, tier: Tier, batch: int, tokens: int) -> Iterator[None]:
        """Record the body of the `with` statement as one stage."""
        if not self.recording:
            yield
            return
        start, cpu = time.monotonic(), time.thread_time()
        yield
        self.stages.append(Stage(tier, start, time.monotonic(), time.thread_time() - cpu, batch, tokens))

    def start(self) -> None:
        self.recording = True

    def take(self) -> list[Stage]:
        """The stages recorded since the last call."""
        return [self.stages.popleft() for _ in range(len(self.stages))]


TIMELINE = Timeline()


def start_recording() -> None:
    """Start recording in this process: passes of models, with the drawing of their tokens."""
    TIMELINE.start()
    verify, step = ModelVerifier.verify, ModelProposer.step

    def timed_verify(self: ModelVerifier, claims: list[Claim]) -> list[Verdict]:
        with TIMELINE.stage(self.tier, len(claims), sum(len(c.proposed) + 1 for c in claims if c.sample)):
            return verify(self, claims)

    def timed_step(self: ModelProposer, forwards: list[Forward]) -> tuple[dict[int, list[int]], Batch]:
        with TIMELINE.stage(self.tier, len(forwards), len(forwards)):
            return step(self, forwards)

    changed: list[tuple[Any, str, Any]] = [(ModelVerifier, "verify", timed_verify), (ModelProposer, "step", timed_step)]
    for kind, name, timed in changed:
        setattr(kind, name, timed)


def take_stages() -> list[tuple[int, float, float, float, int, int]]:
    """The stages recorded in this process since the last call, as plain tuples."""
    return [(int(s.tier), *s[1:]) for s in TIMELINE.take()]
