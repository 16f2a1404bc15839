"""The snapshot: what the target's cache hands the retrieval tier, and how its budget is divided.

A snapshot after the first says what has changed since one that the retrieval tier is known to hold. Which of a
snapshot's slots a chunk has is of no meaning: attention sums over them all, at the absolute positions that are in the
keys. A different order sums in another order of rounding, so a tier may propose other tokens after changes than after
the same snapshot whole, in rare ties; which tokens are committed depends on no proposal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from triforce_core.errors import require


@dataclass(frozen=True, slots=True)
class Changes:
    """What stays of an earlier snapshot: its first `kept` tokens, save the chunks that others replace."""

    base: int  # the version of that snapshot; of no use to a tier that holds another
    kept: int
    places: Tensor  # [replaced, 3] int32: layer, KV head, and place among that head's chunks; in ascending order
    keys: Tensor  # [replaced, chunk, head_dim], rotated to absolute positions
    values: Tensor  # same


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sparse copy of one sequence's KV below `position`, exact for the tokens it holds.

    Whole, or what stays of an earlier one (`changes`) followed by the tokens of `keys` and `values`.
    """

    sequence_id: int
    version: int  # later cuts of the sequence have higher ones
    position: int
    keys: Tensor  # [layers, kv_heads, tokens, head_dim], rotated to absolute positions
    values: Tensor  # same
    changes: Changes | None = None

    @property
    def num_tokens(self) -> int:
        """How many tokens of each layer and KV head a tier holds with it."""
        return self.keys.shape[2] + (self.changes.kept if self.changes else 0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All KV in it, in a fixed order, with the places of what replaces chunks."""
        more = (self.changes.places, self.changes.keys, self.changes.values) if self.changes else ()
        return self.keys, self.values, *more

    @property
    def record(self) -> CutRecord:
        return CutRecord(self.version, self.position, self.changes is not None)


@dataclass(frozen=True, slots=True)
class CutRecord:
    """What the engine remembers of the latest snapshot of a request."""

    version: int
    position: int
    has_base: bool


class SnapshotSink(Protocol):
    """Takes snapshots to the retrieval tier, wherever that is. Never blocks, never fails the caller."""

    def deliver(self, snapshot: Snapshot) -> None: ...

    def busy(self, sequence_id: int) -> bool:
        """Whether it takes no snapshot of this sequence now: the last is still on its way, or too many others are."""
        ...

    def confirmed(self, sequence_id: int) -> int:
        """The latest version of this sequence that the retrieval tier is known to have taken; 0: none."""
        ...


def arrange(held: Tensor, chosen: Tensor, num_chunks: int) -> tuple[Tensor, Tensor]:
    """Give each chosen chunk a place, where it has one already the same one.

    held [layers, kv_heads, places] and chosen [layers, kv_heads, chunks] are int64, distinct in their last dimension
    and below `num_chunks`. Returns the chunk of each place, and where it is not the one held there, both [layers,
    kv_heads, chunks]. Of what was held beyond the last place, nothing counts as held.
    """
    held = held[..., : chosen.shape[-1]]
    kept = held.shape[-1]
    wanted = torch.zeros(*chosen.shape[:2], num_chunks, dtype=torch.bool, device=chosen.device)
    wanted.scatter_(2, chosen, True)
    fresh = torch.ones_like(chosen, dtype=torch.bool)
    fresh[..., :kept] = ~wanted.gather(2, held)
    wanted.scatter_(2, held, False)
    arranged = chosen.clone()
    arranged[..., :kept] = held
    # As many chunks are wanted and not held as places are free, for each layer and KV head: both lists go in step.
    arranged[fresh] = wanted.nonzero()[:, 2]
    return arranged, fresh


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
        require(self.recent >= 0, "recent", self.recent, "must be 0 or more tokens")

    def split(self, position: int) -> tuple[int, int]:
        """For a cut at `position`: where the local window starts, and how many chunks before it are chosen.

        The window is what is left over after the last complete chunk, plus `recent`; the first chunk always has room.
        """
        complete = position // self.chunk
        most_recent = min(self.recent, self.budget - 2 * self.chunk) // self.chunk
        local_start = max(0, complete - most_recent) * self.chunk
        room = (self.budget - (position - local_start)) // self.chunk
        return local_start, min(room, local_start // self.chunk)
