"""Replay: whatever is done to a leader's cache, in whatever order, its follower holds the other KV heads.

The socket between the two is a list here, which the follower reads whenever it gets to it.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.stating import spec
from triforce_core.attention import KERNELS
from triforce_core.kv.base import Forward, KVCache, KVGeometry
from triforce_core.kv.full import FullKV
from triforce_core.kv.retrieval import RetrievalHeld, RetrievalKV
from triforce_core.kv.snapshot import Changes, ChunkSettings, Snapshot
from triforce_core.messages import Span
from triforce_core.models.replay import CallExecutor, LeadingFullKV, LeadingRetrievalKV

LAYERS, HEADS, DIM, CHUNK = 2, 4, 3, 4
BUDGET, TAIL, MAX_LENGTH, SEQUENCES = 32, 40, 400, 3


class Wire:
    """Both ends of the socket. Commands and contents wait until the follower catches up."""

    world, rank = 2, 1

    def __init__(self) -> None:
        self.commands: deque[bytes] = deque()
        self.contents: deque[Snapshot] = deque()

    def broadcast(self, command: object) -> None:
        self.commands.append(pickle.dumps(command))

    def expect(self, num_tokens: int) -> None:
        """No watch is needed: nobody hangs here."""

    def scatter(self, parts: list[Snapshot]) -> None:
        self.contents.extend(parts)

    def accept(self, outlined: Snapshot, device: torch.device) -> Snapshot:
        part = self.contents.popleft()
        assert [t.shape for t in part.tensors] == [t.shape for t in outlined.tensors]
        assert part.record == outlined.record
        return part


class Passes:
    """A follower's runner that has no model. It does only what the host does in a pass."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv

    def forward(self, forwards: list[Forward]) -> None:
        self.kv.prepare(forwards)


def cache(kv_heads: int) -> RetrievalKV:
    geometry = KVGeometry(LAYERS, kv_heads, DIM, torch.float32, torch.device("cpu"))
    kv = RetrievalKV(geometry, SEQUENCES, ChunkSettings(BUDGET), TAIL, KERNELS["reference"])
    for pool in (*kv.keys, *kv.values):
        pool.zero_()
    return kv


def host_side(kv: RetrievalKV) -> Any:
    held = {
        i: (h.tokens, h.cached, h.ranges, h.version, h.position, h.snapshot_tokens)
        for i, h in kv.held.items()
        if isinstance(h, RetrievalHeld)
    }
    waiting = {i: [(s.version, s.position) for s in snapshots] for i, snapshots in kv.arrived.items()}
    return held, list(waiting.items()), kv.allocator.free_ranges


class Source:
    """Snapshots of some sequences: whole ones, and changes to what the cache has, or to what it has not."""

    def __init__(self, seed: int) -> None:
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.latest: dict[int, Snapshot] = {}

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, DIM, generator=self.generator)

    def cut(self, sequence_id: int) -> Snapshot:
        before = self.latest.get(sequence_id)
        version = before.version + self.rng.choice([0, 1, 1, 1]) if before else 1
        position = (before.position if before else 20) + self.rng.randrange(6)
        changes = None
        tokens = self.rng.choice([8, 16, 24])
        if before is not None and self.rng.random() < 0.7:
            kept = before.num_tokens // CHUNK * CHUNK
            everywhere = list(product(range(LAYERS), range(HEADS), range(kept // CHUNK)))
            chosen = sorted(self.rng.sample(everywhere, self.rng.randrange(len(everywhere) // 3)))
            places = torch.tensor(chosen, dtype=torch.int32).reshape(-1, 3)
            base = self.rng.choice([before.version] * 4 + [max(1, before.version - 1)])
            keys, values = self.random(len(places), CHUNK), self.random(len(places), CHUNK)
            changes, tokens = Changes(base, kept, places, keys, values), self.rng.choice([0, 4, 8])
        keys, values = self.random(LAYERS, HEADS, tokens), self.random(LAYERS, HEADS, tokens)
        self.latest[sequence_id] = Snapshot(sequence_id, version, position, keys, values, changes)
        return self.latest[sequence_id]


@pytest.mark.parametrize("seed", range(40))
def test_a_follower_holds_what_its_leader_does(seed: int) -> None:
    rng, source, wire = random.Random(seed), Source(seed), Wire()
    whole, mine, theirs = cache(HEADS), cache(HEADS // 2), cache(HEADS // 2)
    leading = LeadingRetrievalKV(mine, wire)  # type: ignore[arg-type]
    executor = CallExecutor(wire, None, theirs)  # type: ignore[arg-type]
    executor.runners[leading.tier] = Passes(theirs)  # type: ignore[assignment]
    installed = 0
    for _ in range(150):
        sequence_id = rng.randrange(1, SEQUENCES + 3)
        action = rng.random()
        if action < 0.5:
            snapshot = source.cut(sequence_id)
            assert leading.take(snapshot) == whole.take(snapshot)
        elif action < 0.52:
            leading.drop_unstated()
            whole.drop_unstated()
            assert whole.arrived.keys() <= whole.held.keys()
        elif action < 0.9:
            end = source.latest[sequence_id].position + rng.randrange(1, 20) if sequence_id in source.latest else 30
            forward = [Forward(Span(sequence_id, 0, tuple(range(end)), spec(MAX_LENGTH)), 1)]
            batch = leading.prepare(forward)
            assert [row.placed for row in batch.rows] == [row.placed for row in whole.prepare(forward).rows]
            installed += sum(row.placed.visible != [] for row in batch.rows)
        else:
            leading.release(sequence_id)
            whole.release(sequence_id)
            source.latest.pop(sequence_id, None)
        if rng.random() < 0.2:
            while wire.commands:
                executor.execute(pickle.loads(wire.commands.popleft()))
            if not leading.taken:
                assert host_side(theirs) == host_side(mine)
    leading.release(99)  # broadcasts what has come since
    while wire.commands:
        executor.execute(pickle.loads(wire.commands.popleft()))
    whole.release(99)
    assert host_side(theirs) == host_side(mine) == host_side(whole)
    half = HEADS // 2
    for pools, ours, others in ((whole.keys, mine.keys, theirs.keys), (whole.values, mine.values, theirs.values)):
        for layer in range(LAYERS):
            assert torch.equal(pools[layer][:half], ours[layer])
            assert torch.equal(pools[layer][half:], others[layer])
    assert installed > 5


@pytest.mark.parametrize("seed", range(10))
def test_a_follower_lays_out_its_pool_as_its_leader_does(seed: int) -> None:
    """Requests are opened in another order than they are stated in, and some are never stated."""
    rng, wire = random.Random(seed), Wire()
    geometry = KVGeometry(LAYERS, HEADS // 2, DIM, torch.float32, torch.device("cpu"))
    mine, theirs = (FullKV(geometry, 500, KERNELS["reference"]) for _ in range(2))
    leading = LeadingFullKV(mine, wire, gathered=False)  # type: ignore[arg-type]
    executor = CallExecutor(wire, theirs, None)  # type: ignore[arg-type]
    executor.runners[leading.tier] = Passes(theirs)  # type: ignore[assignment]
    grown = 0
    for sequence_id in range(1, 80):
        wanted = spec(rng.randrange(20, 120))
        first = rng.randrange(20, wanted.max_length + 1)
        if leading.can_open(wanted, first):
            leading.open(sequence_id, wanted, first)
        live = list(leading.held)
        for growing in live:
            grown += leading.grow(growing, rng.randrange(20, leading.held[growing].spec.max_length + 1))
        if live and rng.random() < 0.5:
            leading.release(rng.choice(live))
        stated = [i for i in leading.held if rng.random() < 0.3]
        rng.shuffle(stated)
        leading.prepare([Forward(Span(i, 0, tuple(range(rng.randrange(1, 20))), spec(120)), 1) for i in stated])
    while wire.commands:
        executor.execute(pickle.loads(wire.commands.popleft()))
    assert {i: (h.tokens, h.ranges) for i, h in theirs.held.items()} == {
        i: (h.tokens, h.ranges) for i, h in mine.held.items()
    }
    assert theirs.allocator.free_ranges == mine.allocator.free_ranges != [(0, 500)]
    assert theirs.allocator.wishes == mine.allocator.wishes
    assert grown > 20
