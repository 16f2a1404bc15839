"""Times the passes of one runner, without waiting for the device."""

from __future__ import annotations

import time
from collections import deque

import torch

from triforce_core.costs import Part, PassCosts

Moment = float | torch.cuda.Event


class PassClock:
    """On a CPU a pass has ended when its call returns. On a GPU it has only been queued then: events are recorded
    before and after it, and read at some later pass, once they have happened.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.costs = device, PassCosts()
        self.queued: deque[tuple[list[Part], torch.cuda.Event, torch.cuda.Event]] = deque()

    def now(self) -> Moment:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def passed(self, parts: list[Part], began: Moment) -> None:
        """Add a pass over these parts, which began at that moment and ends now, to the costs."""
        ended = self.now()
        if isinstance(began, float) and isinstance(ended, float):
            self.costs.add(parts, ended - began)
        elif isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
            self.queued.append((parts, began, ended))
        while self.queued and self.queued[0][2].query():
            past, first, last = self.queued.popleft()
            self.costs.add(past, first.elapsed_time(last) / 1e3)
