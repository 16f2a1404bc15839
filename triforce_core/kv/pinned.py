"""Copies between a device and ordinary memory of the host, through small pinned buffers that are made once.

Only memory that is pinned is copied while host and device do other things; and the driver copies other memory through
a buffer of its own, at half the speed. While one buffer is on the link, the host fills or reads the other.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

BUFFER_BYTES = 16 << 20
NUM_BUFFERS = 2


def lock(host: Tensor, owner: object) -> int:
    """Pin ordinary memory for as long as `owner` lives, because only copies of pinned memory run while the device
    computes. Returns CUDA's error, which is 0 if it is pinned.

    The memory is registered with CUDA, because torch rounds its own pinned memory up to powers of two, which can take
    twice the memory.
    """
    runtime = torch.cuda.cudart()
    status = int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    if status == 0:
        weakref.finalize(owner, runtime.cudaHostUnregister, host.data_ptr())
    return status


class Buffer:
    """Pinned bytes, and the end of the last copy that read or wrote them."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.device, self.event = device, torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        """Wait until the buffer may be used again."""
        if self.event is not None:
            self.event.synchronize()

    def mark(self) -> None:
        """The copies queued so far use the buffer."""
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(self.device))


class PinnedStaging:
    """Buffers of one thread. Copies are queued in the stream that is current for it, in order."""

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.device, self.buffer_bytes = device, buffer_bytes
        self.buffers: deque[Buffer] = deque()  # made at the first use, because pinning takes time

    def next(self) -> Buffer:
        """The next buffer in turn, once it may be used again."""
        if not self.buffers:
            self.buffers = deque(Buffer(self.device, self.buffer_bytes) for _ in range(NUM_BUFFERS))
        self.buffers.rotate(-1)
        self.buffers[0].wait()
        return self.buffers[0]

    def send(self, fill: Callable[[Tensor, int, int], object], into: Tensor) -> None:
        """Bring rows to the device, into `into` [rows, …]; `fill(buffer, first, stop)` writes some of them."""
        row_bytes = into[0].nbytes if len(into) else 1
        together = self.buffer_bytes // row_bytes
        assert together, "a row fits a buffer"
        for first in range(0, len(into), together):
            stop, buffer = min(first + together, len(into)), self.next()
            staged = buffer.bytes[: (stop - first) * row_bytes].view(into.dtype).view(into[first:stop].shape)
            fill(staged, first, stop)
            into[first:stop].copy_(staged, non_blocking=True)
            buffer.mark()

    def upload(self, source: Tensor) -> Tensor:
        """A copy of a host tensor [heads, …, dim] on the device, of which each head is contiguous."""
        into = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        pinned = source.is_pinned()
        for one, other in zip(source, into, strict=True):
            if pinned:
                other.copy_(one, non_blocking=True)
            else:
                self.send(partial(copy_rows, one.flatten(0, -2)), other.flatten(0, -2))
        return into

    def gather(self, rows: Tensor, index: Tensor, into: Tensor) -> None:
        """Bring `rows[index]` to the device, `into` [count, dim]. `rows` [all, dim], `index` [count]: on the host."""
        self.send(partial(gather_rows, rows, index), into)

    def numbers(self, source: Tensor) -> Tensor:
        """A copy of a device tensor on the host, which waits for it."""
        flat = source.reshape(-1)
        found = torch.empty(flat.shape, dtype=flat.dtype)
        together = self.buffer_bytes // flat.itemsize
        for first in range(0, len(flat), together):
            piece, buffer = flat[first : first + together], self.next()
            staged = buffer.bytes[: piece.nbytes].view(flat.dtype)
            staged.copy_(piece, non_blocking=True)
            buffer.mark()
            buffer.wait()
            found[first : first + together] = staged
        return found.view(source.shape)

    def received(self, parts: list[Tensor]) -> Iterator[Tensor]:
        """Copies of these device tensors [bytes] on the host, each brought while its predecessor is in use. A copy is
        good until the next one is asked for. Where the rest is not asked for, the buffers are free again once the
        iterator is closed.
        """
        try:
            begun = deque([self._begin(part) for part in parts[:1]])
            for index in range(len(parts)):
                begun.extend(self._begin(part) for part in parts[index + 1 : index + 2])
                buffer, size = begun.popleft()
                buffer.wait()
                yield buffer.bytes[:size]
        finally:
            for buffer in self.buffers:
                buffer.wait()

    def _begin(self, part: Tensor) -> tuple[Buffer, int]:
        buffer = self.next()
        buffer.bytes[: len(part)].copy_(part, non_blocking=True)
        buffer.mark()
        return buffer, len(part)


def copy_rows(rows: Tensor, staged: Tensor, first: int, stop: int) -> None:
    staged.copy_(rows[first:stop])


def gather_rows(rows: Tensor, index: Tensor, staged: Tensor, first: int, stop: int) -> None:
    torch.index_select(rows, 0, index[first:stop], out=staged)
