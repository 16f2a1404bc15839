"""The snapshot: the sparse KV that the target's cache hands to the retrieval tier, and the division of its budget. A
later one has only the changes to an earlier one, if the retrieval tier is known to hold that. The order of its chunks
only changes rounding, and so in rare ties the tier's proposals; committed tokens do not depend on these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes to an earlier snapshot: its first `kept` tokens stay, except the chunks that are replaced."""

    base: int  # the version of the earlier snapshot, which the tier must hold
    kept: int
    places: Tensor  # [replaced, 3] int32: layer, KV head, and place among that head's chunks; in ascending order
    keys: Tensor  # [replaced, chunk, head_dim], rotated to absolute positions
    values: Tensor  # same


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sparse copy of one sequence's KV below `position`, exact for the tokens in it.

    Without `changes` it is whole. With `changes` it is the kept part of an earlier snapshot, followed by the tokens of
    `keys` and `values`.
    """

    sequence_id: int
    version: int  # higher for later snapshots of the sequence
    position: int
    keys: Tensor  # [layers, kv_heads, tokens, head_dim], rotated to absolute positions
    values: Tensor  # same
    changes: Changes | None = None

    @property
    def num_tokens(self) -> int:
        """The tokens per layer and KV head, including those kept of the earlier snapshot."""
        return self.keys.shape[2] + (self.changes.kept if self.changes else 0)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All its tensors in a fixed order: the KV, and with `changes` the places and KV of the new chunks."""
        more = (self.changes.places, self.changes.keys, self.changes.values) if self.changes else ()
        return self.keys, self.values, *more

    @property
    def record(self) -> CutRecord:
        return CutRecord(self.version, self.position, self.changes is not None)


@dataclass(frozen=True, slots=True)
class CutRecord:
    """The engine's record of a request's latest snapshot."""

    version: int
    position: int
    has_base: bool


class SnapshotSink(Protocol):
    """Delivers snapshots to the retrieval tier, in this or another process. It never blocks and never raises."""

    def deliver(self, snapshot: Snapshot) -> None: ...

    def busy(self, sequence_id: int) -> bool:
        """Whether no snapshot of this sequence can be sent now: its last, or too many others, are still on the way."""
        ...

    def confirmed(self, sequence_id: int) -> int:
        """The latest version of this sequence that the retrieval tier is known to have accepted; 0: none."""
        ...


def arrange(held: Tensor, chosen: Tensor, num_chunks: int) -> tuple[Tensor, Tensor]:
    """Assign each chosen chunk to a place; a chunk that is already held keeps its place.

    held [layers, kv_heads, places] and chosen [layers, kv_heads, chunks] are int64, distinct in their last dimension
    and below `num_chunks`. Returns the chunk of each place, and a mask of the places whose chunk is new there, both
    [layers, kv_heads, chunks]. Held chunks beyond the last place are ignored.
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
    # Each layer and KV head has as many free places as chunks that are wanted and not held, so both lists align.
    arranged[fresh] = wanted.nonzero()[:, 2]
    return arranged, fresh


@dataclass(frozen=True, slots=True)
class ChunkSettings:
    """How a snapshot's budget is divided into chunks; all in tokens."""

    budget: int = 1024
    chunk: int = 8
    recent: int = 64  # tokens just before the position that are always kept, rounded down to whole chunks

    @classmethod
    def halved(cls, budget: int, chunk: int) -> ChunkSettings:
        """One half for the latest tokens, the other for chosen chunks. On held-out files, at 1,024 tokens, more drafts
        are accepted in this way than with fewer recent tokens, with every selector but `streaming`, for which the
        division makes no difference (docs/benchmarks/cpu.md).
        """
        return cls(budget, chunk, budget // 2)

    def near(self, window: int) -> int:
        """The latest complete chunks that a window may reach, as far as they fit. In a layer with a window, the first
        places hold these, each the latest with its number modulo their number. What the other places hold is not read.
        """
        return min(-(-window // self.chunk) + 1, self.budget // self.chunk - 1)

    def split(self, position: int) -> tuple[int, int]:
        """For a cut at `position`: where the recent window starts, and how many chunks before it are chosen.

        The window is the incomplete last chunk and about `recent` tokens before it. The budget always has room for the
        text's first chunk.
        """
        complete = position // self.chunk
        most_recent = min(self.recent, self.budget - 2 * self.chunk) // self.chunk
        local_start = max(0, complete - most_recent) * self.chunk
        room = (self.budget - (position - local_start)) // self.chunk
        return local_start, min(room, local_start // self.chunk)
