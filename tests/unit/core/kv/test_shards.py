"""Snapshots over ranks: splitting and joining undo one another, and what ranks cut joins to what one process cuts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from tests.stating import spec
from triforce_core.attention import KERNELS
from triforce_core.errors import InvalidValueError
from triforce_core.kv.base import KVGeometry
from triforce_core.kv.full import FullKV
from triforce_core.kv.full_held import FullHeld
from triforce_core.kv.selectors import MeanKey
from triforce_core.kv.shards import join, split
from triforce_core.kv.snapshot import ChunkSettings, Snapshot

LENGTH, DIM, LAYERS, GROUP = 400, 4, 3, 2  # GROUP: query heads a KV head


class Rank:
    """A full cache that holds a range of KV heads, of KV and queries that are the same whoever holds them."""

    def __init__(self, heads: range, seed: int) -> None:
        self.heads, self.seed = heads, seed
        geometry = KVGeometry(LAYERS, len(heads), DIM, torch.float32, torch.device("cpu"))
        self.kv = FullKV(geometry, LENGTH, KERNELS["reference"])
        held = self.kv.open(1, spec(LENGTH))
        assert isinstance(held, FullHeld)
        self.held = held
        for layer in range(LAYERS):
            for local, head in enumerate(heads):
                generator = torch.Generator().manual_seed(1000 * seed + 10 * layer + head)
                for pool in (self.kv.keys, self.kv.values):
                    pool[layer][local, :LENGTH] = torch.randn(LENGTH, DIM, generator=generator)

    def grow(self, position: int) -> None:
        """Settle the text up to `position`, with new queries there."""
        self.held.cached = position
        self.held.queries.expect(position - 1, position - 1, position)
        for layer in range(LAYERS):
            each = [
                torch.randn(
                    GROUP, 1, DIM, generator=torch.Generator().manual_seed(7 * self.seed + position + layer + 31 * head)
                )
                for head in self.heads
            ]
            self.held.queries.take(layer, torch.cat(each), 1)


def cuts(rank: Rank, chunks: ChunkSettings, seed: int) -> Iterator[Snapshot]:
    """Cut whole snapshots, and changes to the latest snapshot or to its base. Every rank cuts the same ones."""
    rng = random.Random(seed)
    position = 20
    while position < LENGTH:
        rank.grow(position)
        latest = rank.held.snapshots_cut
        base = rng.choice([0, latest, latest, max(0, latest - 1)])
        yield rank.kv.cut(1, position, chunks, MeanKey(), base)
        position += rng.choice([1, 5, 13, 40])


def assert_same(one: Snapshot, other: Snapshot) -> None:
    assert one.record == other.record
    assert one.num_tokens == other.num_tokens
    for ours, theirs in zip(one.tensors, other.tensors, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    if one.changes and other.changes:
        assert (one.changes.base, one.changes.kept) == (other.changes.base, other.changes.kept)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "chunks", [ChunkSettings(64, 8, 16), ChunkSettings(40, 1, 5), ChunkSettings(64, 32, 0), ChunkSettings(512, 8, 8)]
)
@pytest.mark.parametrize(("world", "kv_heads"), [(1, 2), (2, 2), (2, 4), (4, 4), (3, 6)])
def test_what_ranks_cut_is_what_one_process_cuts(world: int, kv_heads: int, chunks: ChunkSettings, seed: int) -> None:
    whole = Rank(range(kv_heads), seed)
    share = kv_heads // world
    ranks = [Rank(range(r * share, (r + 1) * share), seed) for r in range(world)]
    kinds: set[str] = set()
    for snapshot, *parts in zip(*(cuts(each, chunks, seed) for each in (whole, *ranks)), strict=True):
        assert_same(join(parts), snapshot)
        for part, of_whole in zip(parts, split(snapshot, world), strict=True):
            assert_same(of_whole, part)
        changes = snapshot.changes
        kinds.add("whole" if changes is None else "changes")
        if changes is not None:
            places = changes.places.tolist()
            assert all(before < after for before, after in pairwise(places)), "ascending"
    assert kinds == {"whole", "changes"}


def test_heads_that_do_not_divide_are_refused() -> None:
    whole = Rank(range(4), 0)
    whole.grow(100)
    with pytest.raises(InvalidValueError, match="snapshot: 4 KV heads must divide by 3 ranks"):
        split(whole.kv.cut(1, 100, ChunkSettings(64, 8, 16), MeanKey()), 3)
