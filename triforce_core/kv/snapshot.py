"""The snapshot: what the target's cache hands the retrieval tier, and how its budget is divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from triforce_core.errors import require


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sparse copy of one sequence's KV below `position`, exact for the tokens it holds."""

    sequence_id: int
    version: int  # later cuts of the sequence have higher ones
    position: int
    keys: Tensor  # [layers, kv_heads, tokens ≤ budget, head_dim], rotated to absolute positions
    values: Tensor  # same


class SnapshotSink(Protocol):
    """Takes snapshots to the retrieval tier, wherever that is. Never blocks, never fails the caller."""

    def deliver(self, snapshot: Snapshot) -> None: ...

    def in_flight(self, sequence_id: int) -> bool:
        """Whether a snapshot of this sequence is still on its way."""
        ...


@dataclass(frozen=True, slots=True)
class ChunkSettings:
    """How a snapshot's budget is divided into chunks; all in tokens."""

    budget: int = 1024
    chunk: int = 8
    recent: int = 64  # always kept before the position, rounded down to chunks

    def __post_init__(self) -> None:
        require(self.chunk >= 1, "retrieval.chunk", self.chunk, "must be at least 1 token")
        require(
            self.budget % self.chunk == 0,
            "retrieval.budget",
            self.budget,
            f"must be a multiple of the chunk, {self.chunk}",
        )
        require(
            self.budget >= 2 * self.chunk,
            "retrieval.budget",
            self.budget,
            f"must hold two chunks of {self.chunk} tokens",
        )
        require(self.recent >= 0, "retrieval.recent", self.recent, "must be 0 or more tokens")

    def split(self, position: int) -> tuple[int, int]:
        """For a cut at `position`: where the local window starts, and how many chunks before it are chosen.

        The window is what is left over after the last complete chunk, plus `recent`; the first chunk always has room.
        """
        complete = position // self.chunk
        most_recent = min(self.recent, self.budget - 2 * self.chunk) // self.chunk
        local_start = max(0, complete - most_recent) * self.chunk
        room = (self.budget - (position - local_start)) // self.chunk
        return local_start, min(room, local_start // self.chunk)
