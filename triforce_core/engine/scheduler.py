"""The scheduler decides which requests go live, and how they share one forward pass."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from triforce_core.engine.sequence import Sequence
from triforce_core.messages import SequenceSpec, Work


class Pool(Protocol):
    """The part of the target's KV cache that admission needs."""

    def can_open(self, spec: SequenceSpec) -> bool: ...

    def open(self, sequence_id: int, spec: SequenceSpec) -> object: ...


FIRST_TOKEN = (1, 0, 0)  # lookaheads: the target draws one token, and no tier below is asked


class Scheduler:
    """First come, first served. All prefill chunks of a pass together have at most `prefill_chunk` tokens.

    A request goes live when the target's pool has room for its whole length, so no live request ever runs out of room.
    """

    def __init__(self, kv: Pool, *, max_sequences: int, prefill_chunk: int, scored_chunk: int | None = None) -> None:
        """`scored_chunk`: most tokens of a pass that belong to prompts whose logprobs are asked for."""
        self.kv, self.max_sequences, self.prefill_chunk = kv, max_sequences, prefill_chunk
        self.scored_chunk = scored_chunk or prefill_chunk
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
        """Work for each live request that has none outstanding: its next prefill chunk, or a round of decoding."""
        work, prefill_room, scored_room = [], self.prefill_chunk, self.scored_chunk
        for sequence in self.live.values():
            if sequence.work is not None:
                continue
            if not sequence.prefilling:
                sequence.work = next_round(sequence)
            else:
                scored = sequence.spec.prompt_logprobs is not None
                room = min(prefill_room, scored_room) if scored else prefill_room
                if not room:
                    continue
                sequence.work = next_chunk(sequence, room)
                prefill_room -= len(sequence.work.span.tokens)
                scored_room -= len(sequence.work.span.tokens) * scored
            work.append(sequence.work)
        return work

    @property
    def asked_tokens(self) -> int:
        """Upper bound on the tokens of the target's next pass: all new tokens in its unanswered work."""
        asked = [(s.work, s.prefilled) for s in self.live.values() if s.work is not None]
        return sum(w.span.end - prefilled + max(w.lookaheads[1:], default=0) for w, prefilled in asked)

    def remove(self, sequence_id: int) -> Sequence | None:
        """Take a request out, live or queued."""
        for queued in self.queue:
            if queued.sequence_id == sequence_id:
                self.queue.remove(queued)
                return queued
        return self.live.pop(sequence_id, None)


def next_chunk(sequence: Sequence, most_tokens: int) -> Work:
    """The work for the next prefill chunk. The last chunk also yields the first token, from the target alone."""
    stop = min(sequence.prefilled + most_tokens, len(sequence.tokens))
    span = sequence.span(sequence.prefilled, stop)
    return Work(span, FIRST_TOKEN) if stop == len(sequence.tokens) else Work(span, (1,), sample=False)


def next_round(sequence: Sequence) -> Work:
    """The work for one round of decoding. With lookaheads of 0 it states only the tokens that the target lacks."""
    lookaheads = sequence.request.lookaheads
    start = sequence.stated if any(lookaheads) else sequence.prefilled
    return Work(sequence.span(start, len(sequence.tokens)), (1, *lookaheads))
