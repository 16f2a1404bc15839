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

StreamEvent = torch.cuda.Event | None  # a moment of one stream, for the other to wait for; None: it has passed


class CopyStream(Protocol):
    """CudaCopies the stream that computes."""

    def copying(self, after: StreamEvent) -> AbstractContextManager[None]:
        """Copies asked for within run when the computation has passed `after`."""
        ...

    def copied(self) -> StreamEvent:
        """The end of the copies asked for so far."""
        ...

    def computed(self) -> StreamEvent:
        """The end of the computation asked for so far."""
        ...

    def compute_after(self, mark: StreamEvent) -> None:
        """What is computed from here on waits for copies up to `mark`."""
        ...

    def wait(self) -> None:
        """Until all copies have ended, and the host may read what they wrote."""
        ...


class BlockingCopies:
    """On the CPU nothing waits: a copy is over when the call returns."""

    def copying(self, after: StreamEvent) -> AbstractContextManager[None]:
        return nullcontext()

    def copied(self) -> StreamEvent:
        return None

    def computed(self) -> StreamEvent:
        return None

    def compute_after(self, mark: StreamEvent) -> None:
        """It has passed."""

    def wait(self) -> None:
        """They have ended."""


class CudaCopies:
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    @contextmanager
    def copying(self, after: StreamEvent) -> Iterator[None]:
        if after is not None:
            self.stream.wait_event(after)
        with torch.cuda.stream(self.stream):
            yield

    def copied(self) -> StreamEvent:
        mark: StreamEvent = self.stream.record_event()
        return mark

    def computed(self) -> StreamEvent:
        mark: StreamEvent = torch.cuda.current_stream(self.device).record_event()
        return mark

    def compute_after(self, mark: StreamEvent) -> None:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def wait(self) -> None:
        self.stream.synchronize()


def copy_stream(device: torch.device) -> CopyStream:
    return CudaCopies(device) if device.type == "cuda" else BlockingCopies()


def copy_slots(source: Tensor, into: Tensor, ranges: list[Range]) -> None:
    """Copy these slots of a layer's KV, [2, kv_heads, pool_tokens, head_dim], between host and device.

    A range of one head at a time: what is not contiguous is packed first, by the host, which would wait for it.
    """
    for one, other in zip(source.flatten(0, 1), into.flatten(0, 1), strict=True):
        for start, stop in ranges:
            other[start:stop].copy_(one[start:stop], non_blocking=True)
