"""What the engine does next: which requests go live, and how one forward pass is shared between them."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from triforce_core.engine.sequence import Sequence
from triforce_core.messages import SequenceSpec, Work


class Pool(Protocol):
    """The target's KV cache as far as admission goes."""

    def can_open(self, spec: SequenceSpec) -> bool: ...

    def open(self, sequence_id: int, spec: SequenceSpec) -> object: ...


class Scheduler:
    """First come, first served, with one token budget for the prompt chunks of a pass.

    A request goes live when the target's pool has room for its whole length, so that no live request ever lacks room.
    """

    def __init__(self, kv: Pool, *, max_sequences: int, prefill_chunk: int) -> None:
        self.kv, self.max_sequences, self.prefill_chunk = kv, max_sequences, prefill_chunk
        self.queue: deque[Sequence] = deque()
        self.live: dict[int, Sequence] = {}

    def admit(self) -> None:
        """Move requests from the queue to the live ones while there is room."""
        while self.queue and len(self.live) < self.max_sequences and self.kv.can_open(self.queue[0].spec):
            sequence = self.queue.popleft()
            self.kv.open(sequence.sequence_id, sequence.spec)
            sequence.stats.queued_s = sequence.lap()
            self.live[sequence.sequence_id] = sequence

    def next_work(self) -> list[Work]:
        """One Work for each live request that waits for none: its next prompt chunk, or a round of decoding."""
        work, prefill_room = [], self.prefill_chunk
        for sequence in self.live.values():
            if sequence.waiting:
                continue
            if not sequence.prefilling:
                span = sequence.span(sequence.stated, len(sequence.tokens))
                work.append(Work(span, (1, *sequence.request.lookaheads)))
            elif prefill_room:
                stop = min(sequence.prefilled + prefill_room, len(sequence.tokens) - 1)
                prefill_room -= stop - sequence.prefilled
                work.append(Work(sequence.span(sequence.prefilled, stop), (1,), sample=False))
            else:
                continue
            sequence.waiting = True
        return work

    def remove(self, sequence_id: int) -> Sequence | None:
        """Take a request out, live or queued."""
        for queued in self.queue:
            if queued.sequence_id == sequence_id:
                self.queue.remove(queued)
                return queued
        return self.live.pop(sequence_id, None)
