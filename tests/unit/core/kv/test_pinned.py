"""Copies through small pinned buffers: they bring what they were given, however late the link is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from triforce_core.kv import pinned
from triforce_core.kv.pinned import PinnedStaging

CPU = torch.device("cpu")


class Link(TorchDispatchMode):
    """A link on which copies marked as not blocking run only when somebody waits for them: stands for a GPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.due: list[tuple[Tensor, Tensor]] = []
        self.done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and len(args) > 2 and args[2]:
            self.due.append(args[:2])
            return args[0]
        return func(*args, **(kwargs or {}))

    def run(self, until: int) -> None:
        """Run the first copies, up to the copy of this number."""
        for into, source in self.due[self.done : until]:
            torch.ops.aten.copy_.default(into, source)
            self.done += 1


class Late:
    """An event of that link."""

    link: Link

    def __init__(self) -> None:
        self.copies = 0

    def record(self, stream: object) -> None:
        self.copies = len(self.link.due)

    def synchronize(self) -> None:
        self.link.run(self.copies)


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> PinnedStaging:
    """A staging with buffers of 64 bytes, on a link that is as late as it may be."""
    made = PinnedStaging(CPU, 64)
    monkeypatch.setattr(pinned.Buffer, "__init__", buffer_of_events)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return made


def buffer_of_events(buffer: Any, device: torch.device, num_bytes: int) -> None:
    buffer.bytes, buffer.event, buffer.device = torch.empty(num_bytes, dtype=torch.uint8), Late(), CPU


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 29])
def test_what_is_gathered_is_what_indexing_gives(staging: PinnedStaging, rows: int) -> None:
    source, index = torch.randn(50, 5), torch.randint(50, (rows,))
    with Link() as Late.link:
        found = torch.full((rows, 5), torch.nan)
        staging.gather(source, index, found)
        Late.link.run(len(Late.link.due))
    assert torch.equal(found, source[index])


def test_what_is_uploaded_is_the_same(staging: PinnedStaging) -> None:
    """Here it is a part of a pool: each head is contiguous, and the whole is not."""
    pool = torch.randn(3, 40, 5)
    with Link() as Late.link:
        found = staging.upload(pool[:, 7:31].unflatten(1, (-1, 4)))
        Late.link.run(len(Late.link.due))
    assert torch.equal(found, pool[:, 7:31].unflatten(1, (-1, 4)))


def test_numbers_are_there_when_the_call_returns(staging: PinnedStaging) -> None:
    numbers = torch.arange(100).view(4, 25)
    with Link() as Late.link:
        assert torch.equal(staging.numbers(numbers), numbers)


def test_a_buffer_is_not_written_while_it_is_on_the_link(staging: PinnedStaging) -> None:
    """Uploads one after another share the buffers."""
    sources = [torch.randn(2, 9, 5) for _ in range(4)]
    with Link() as Late.link:
        found = [staging.upload(source) for source in sources]
        Late.link.run(len(Late.link.due))
    assert all(map(torch.equal, found, sources))


def test_no_more_is_pinned_than_two_buffers(staging: PinnedStaging) -> None:
    with Link() as Late.link:
        for _ in range(3):
            staging.upload(torch.randn(2, 30, 5))
    assert sum(len(buffer.bytes) for buffer in staging.buffers) == 2 * 64


def test_pieces_come_one_by_one_and_are_good_until_the_next(staging: PinnedStaging) -> None:
    parts = [torch.randint(256, (size,), dtype=torch.uint8) for size in (64, 64, 3, 0, 64, 10)]
    with Link() as Late.link:
        found = [part.clone() for part in staging.received(parts)]
    assert all(map(torch.equal, found, parts))
    assert list(staging.received([])) == []


def test_what_is_abandoned_gives_its_buffers_back(staging: PinnedStaging) -> None:
    """A copy that was started ahead must not meet what the next hand-over writes to the same buffer."""
    first, second = ([torch.full((64,), value + i, dtype=torch.uint8) for i in range(4)] for value in (10, 20))
    with Link() as Late.link:
        for taken in range(4):
            pieces = staging.received(first)
            for _ in range(taken):
                next(pieces)
            pieces.close()
            assert Late.link.done == len(Late.link.due), "nothing is on its way"
            assert all(map(torch.equal, [part.clone() for part in staging.received(second)], second))
    assert len(staging.buffers) == 2
