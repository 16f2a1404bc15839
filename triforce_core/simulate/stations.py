"""Devices, queues, and the loop that all tiers share: wait for input, take it, run a pass, hand on the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import simpy

from triforce_core.messages import Tier
from triforce_core.simulate.measures import PassRecord, Window

Item = TypeVar("Item")
Events = Generator[simpy.Event, Any, None]


class Sized(Protocol):
    """The input of one pass."""

    @property
    def batch(self) -> int:
        """Number of requests."""
        ...


Taken = TypeVar("Taken", bound=Sized)


class Device:
    """One GPU. It runs one pass at a time; its tiers get it in the order in which they asked."""

    def __init__(self, env: simpy.Environment, name: str) -> None:
        self.name = name
        self.slot = simpy.Resource(env, capacity=1)
        self.passes: list[PassRecord] = []


class Line(Generic[Item]):
    """A first-come, first-served queue that measures its mean length over the window."""

    def __init__(self, env: simpy.Environment, window: Window) -> None:
        self.env, self.window = env, window
        self.items: deque[Item] = deque()
        self.item_seconds, self.changed_s = 0.0, 0.0

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def _count(self) -> None:
        if self.items:
            self.item_seconds += len(self.items) * self.window.overlap_s(self.changed_s, self.env.now)
        self.changed_s = self.env.now

    def add(self, items: Iterable[Item]) -> None:
        self._count()
        self.items.extend(items)

    def take(self, items: list[Item]) -> list[Item]:
        """Remove the items from the queue; returns them."""
        self._count()
        for item in items:
            self.items.remove(item)
        return items

    @property
    def mean_length(self) -> float:
        self._count()
        return self.item_seconds / self.window.length_s


class Station(ABC, Generic[Taken]):
    """One tier of one pipeline. Subclasses define when a pass can start, its input, its duration and its outcome."""

    tier: Tier

    def __init__(self, env: simpy.Environment, device: Device) -> None:
        self.env, self.device = env, device
        self.up, self.running = True, False
        self.failures = 0
        self.woken = env.event()
        self.process = env.process(self._serve())

    @abstractmethod
    def ready(self) -> bool: ...

    @abstractmethod
    def take(self) -> Taken: ...

    @abstractmethod
    def seconds(self, taken: Taken) -> float: ...

    @abstractmethod
    def finish(self, taken: Taken) -> None: ...

    def lose(self, taken: Taken) -> None:
        """Handle the input of a pass during which the tier failed; called after `failed`."""

    def failed(self) -> None:
        """Called when the tier has just gone down."""

    def recovered(self) -> None:
        """Called when the tier is up again."""

    def wake(self) -> None:
        """Check again whether a pass can start."""
        if not self.woken.triggered:
            self.woken.succeed()

    def _serve(self) -> Events:
        while True:
            while not (self.up and self.ready()):
                self.woken = self.env.event()
                yield self.woken
            with self.device.slot.request() as slot:
                yield slot
                if not (self.up and self.ready()):  # it may have changed while another tier had the device
                    continue
                taken = self.take()
                start, self.running = self.env.now, True
                try:
                    yield self.env.timeout(self.seconds(taken))
                    lost = False
                except simpy.Interrupt:
                    lost = True
                self.running = False
                self.device.passes.append(PassRecord(self.tier, start, self.env.now, taken.batch))
            if lost:
                self.lose(taken)
            else:
                self.finish(taken)

    def fail(self) -> None:
        """Let the tier's process die; the pass that it was running is lost."""
        self.up = False
        self.failures += 1
        if self.running:
            self.process.interrupt()
        self.failed()

    def recover(self) -> None:
        self.up = True
        self.recovered()
        self.wake()
