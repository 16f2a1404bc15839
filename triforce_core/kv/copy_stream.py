"""Copies between host and device that run while the device computes, and how the two wait for one another.

Copies run in the order in which they are asked for, those to the device and those from it in one stream: what is
written back is then there for whoever fetches it later, at no further word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from triforce_core.kv.ranges import Range

Mark = torch.cuda.Event | None  # a moment of one stream, for the other to wait for; None: it has passed


class CopyStream(Protocol):
    """Beside the stream that computes."""

    def copying(self, after: Mark) -> AbstractContextManager[None]:
        """Copies asked for within run when the computation has passed `after`."""
        ...

    def copied(self) -> Mark:
        """The end of the copies asked for so far."""
        ...

    def computed(self) -> Mark:
        """The end of the computation asked for so far."""
        ...

    def compute_after(self, mark: Mark) -> None:
        """What is computed from here on waits for copies up to `mark`."""
        ...

    def wait(self) -> None:
        """Until all copies have ended, and the host may read what they wrote."""
        ...


class InTurn:
    """On the CPU nothing waits: a copy is over when the call returns."""

    def copying(self, after: Mark) -> AbstractContextManager[None]:
        return nullcontext()

    def copied(self) -> Mark:
        return None

    def computed(self) -> Mark:
        return None

    def compute_after(self, mark: Mark) -> None:
        """It has passed."""

    def wait(self) -> None:
        """They have ended."""


class Beside:
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    @contextmanager
    def copying(self, after: Mark) -> Iterator[None]:
        if after is not None:
            self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            yield

    def copied(self) -> Mark:
        mark: Mark = self.stream.record_event()
        return mark

    def computed(self) -> Mark:
        mark: Mark = torch.cuda.current_stream(self.device).record_event()
        return mark

    def compute_after(self, mark: Mark) -> None:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def wait(self) -> None:
        self.stream.synchronize()


def copy_stream(device: torch.device) -> CopyStream:
    return Beside(device) if device.type == "cuda" else InTurn()


def copy_slots(source: Tensor, into: Tensor, ranges: list[Range]) -> None:
    """Copy these slots of a layer's KV, [2, kv_heads, pool_tokens, head_dim], between host and device.

    A range of one head at a time: what is not contiguous is packed first, by the host, which would wait for it.
    """
    for one, other in zip(source.flatten(0, 1), into.flatten(0, 1), strict=True):
        for start, stop in ranges:
            other[start:stop].copy_(one[start:stop], non_blocking=True)
