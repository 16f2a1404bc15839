"""Copies between host and device that run while the device computes, and events with which either waits for the other.

Copies to the device and copies from it run in one stream, in the order in which they are requested. A copy to the
device therefore needs no event to see KV that an earlier copy wrote back.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from triforce_core.kv.ranges import Range

StreamEvent = torch.cuda.Event | None  # a point in one stream that the other can wait for; None: it has passed


class CopyStream:
    """Copies beside the computation. On a CPU, as here, they end before the call returns, so that nothing waits."""

    def copying(self, after: StreamEvent) -> AbstractContextManager[None]:
        """Copies requested in the body start after the computation has passed `after`."""
        return nullcontext()

    def copied(self) -> StreamEvent:
        """The end of the copies requested so far."""
        return None

    def computed(self) -> StreamEvent:
        """The end of the computation queued so far."""
        return None

    def compute_after(self, mark: StreamEvent) -> None:
        """Computation that is queued later waits for the copies up to `mark`."""

    def wait(self) -> None:
        """Block the host until all copies have ended, so that it may read the results."""


class CudaCopies(CopyStream):
    """Copies in a separate CUDA stream."""

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
    return CudaCopies(device) if device.type == "cuda" else CopyStream()


def copy_slots(source: Tensor, into: Tensor, ranges: list[Range]) -> None:
    """Copy these slots of a layer's KV, [2, kv_heads, pool_tokens, head_dim], between host and device.

    Each range of each head is copied separately, because the host would pack a non-contiguous range first and wait.
    """
    for one, other in zip(source.flatten(0, 1), into.flatten(0, 1), strict=True):
        for start, stop in ranges:
            other[start:stop].copy_(one[start:stop], non_blocking=True)
