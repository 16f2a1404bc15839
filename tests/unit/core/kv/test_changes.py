"""Snapshots that say what has changed: after any sequence of them, the retrieval tier holds what a whole one gives."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.stating import fragment, num_bytes, spec
from triforce_core.attention import KERNELS
from triforce_core.kv.base import Forward, KVGeometry
from triforce_core.kv.full import FullKV
from triforce_core.kv.full_held import FullHeld
from triforce_core.kv.retrieval import MAX_WAITING, RetrievalKV
from triforce_core.kv.selectors import MeanKey
from triforce_core.kv.snapshot import ChunkSettings, Snapshot, arrange
from triforce_core.messages import Span

LENGTH, TAIL, DIM, LAYERS, HEADS = 700, 200, 6, 2, 4
Contents = dict[tuple[int, int], Tensor]  # by layer and KV head: [tokens, 2 * DIM], keys and values, by position
CHUNKS = [
    ChunkSettings(96, 8, 16),
    ChunkSettings(60, 1, 10),
    ChunkSettings(96, 32, 32),
    ChunkSettings(96, 32, 0),
    ChunkSettings(64, 8, 300),  # nearly all of the budget is the local window
    ChunkSettings(640, 8, 64),  # holds the whole text for long
]


class Writer:
    """A full cache whose KV is random, but the first number of each key tells its position. Its text grows by
    `grow`.
    """

    def __init__(self, kv_heads: int, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.geometry = KVGeometry(LAYERS, kv_heads, DIM, torch.float32, torch.device("cpu"))
        self.kv = FullKV(self.geometry, 2 * LENGTH, KERNELS["cpu_flash"])
        fragment(self.kv, 190, LENGTH)
        held = self.kv.open(1, spec(LENGTH))
        assert isinstance(held, FullHeld)
        self.held = held
        for keys, values in zip(self.kv.keys, self.kv.values, strict=True):
            keys.copy_(self.random(*keys.shape))
            values.copy_(self.random(*values.shape))
            keys[:, self.slots, 0] = torch.arange(float(LENGTH))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    @property
    def slots(self) -> list[int]:
        return [s for a, b in self.held.ranges for s in range(a, b)][:LENGTH]

    def grow(self, position: int, *, drift: float) -> None:
        """Settle the text up to `position`. The queries there are the queries of before with some noise."""
        self.held.cached = position
        kept = self.held.queries
        before = [kept.of(layer) for layer in range(LAYERS)] if kept.positions else None
        kept.expect(position - 1, position - 1, position)
        for layer in range(LAYERS):
            fresh = self.random(HEADS, 1, DIM)
            kept.take(layer, fresh if before is None else before[layer] + drift * fresh, 1)


def reader(writer: Writer, budget: int, *, pieces: bool = False) -> RetrievalKV:
    kv = RetrievalKV(writer.geometry, 2, ChunkSettings(budget), TAIL, KERNELS["cpu_flash"])
    if pieces:
        fragment(kv, 13, budget + TAIL)
    return kv


def seen(kv: RetrievalKV, position: int) -> Contents:
    """What a token at `position` attends to besides itself."""
    [row] = kv.prepare([Forward(Span(1, 0, tuple(range(position + 1)), spec(LENGTH)), 1)]).rows
    slots = [s for a, b in row.placed.visible for s in range(a, b)]
    found = {}
    for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
        for head in range(len(keys)):
            rows = torch.cat([keys[head, slots], values[head, slots]], dim=1)
            found[layer, head] = rows[rows[:, 0].argsort()]
    return found


def assert_same(found: Contents, expected: Contents) -> None:
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        assert found[name][:, 0].tolist() == rows[:, 0].tolist(), "the positions"
        assert torch.equal(found[name], rows), "their KV, bit for bit"


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_changes_give_what_a_whole_snapshot_gives(chunks: ChunkSettings, kv_heads: int, seed: int) -> None:
    """Some snapshots are lost on the way, and the receiver is restarted now and then."""
    rng = random.Random(seed)
    writer = Writer(kv_heads, seed)
    receiver = reader(writer, chunks.budget, pieces=bool(seed % 2))
    position, sent, whole = 1, 0, 0
    while True:
        position += rng.choice([1, 2, 7, 16, 40])
        if position >= LENGTH:
            break
        writer.grow(position, drift=rng.choice([0.0, 0.1, 1.0]))
        base, layouts = receiver.confirmed(1), dict(writer.held.layouts)
        fresh = reader(writer, chunks.budget)
        fresh.deliver(writer.kv.cut(1, position, chunks, MeanKey()))
        writer.held.layouts = layouts  # as if that one had not been cut
        snapshot = writer.kv.cut(1, position, chunks, MeanKey(), base)
        whole += snapshot.changes is None
        sent += 1
        assert all(tensor.is_contiguous() for tensor in snapshot.tensors), "collectives send no others"
        assert len(writer.held.layouts) <= 2, "of the latest and of its base: they are memory of the device"
        if rng.random() < 0.1:
            continue
        assert receiver.take(snapshot) == (snapshot.changes is None or snapshot.changes.base == base)
        assert_same(seen(receiver, position), seen(fresh, position))
        if rng.random() < 0.05:
            receiver = reader(writer, chunks.budget)
    assert sent > whole + 5, "changes were sent"


@pytest.mark.parametrize("chunks", CHUNKS[:4], ids=str)
def test_a_snapshot_of_changes_carries_little_else(chunks: ChunkSettings) -> None:
    """If the queries are those of before, it carries only what was decoded since, and the chunks that leave the end of
    the budget.
    """
    writer = Writer(2)
    writer.grow(500, drift=0)
    first = writer.kv.cut(1, 500, chunks, MeanKey())
    assert first.changes is None
    per_token = num_bytes(first) // first.num_tokens
    for grown in (1, 8, 16):
        writer.grow(500 + grown, drift=0)
        base = writer.kv.cut(1, 500, chunks, MeanKey())
        changed = writer.kv.cut(1, 500 + grown, chunks, MeanKey(), base.version)
        assert changed.changes is not None
        assert num_bytes(changed) <= (grown + 5 * chunks.chunk) * per_token, "in KV of tokens"
        assert num_bytes(changed) < num_bytes(first) or chunks.chunk == 32


def test_queries_that_turn_elsewhere_change_more() -> None:
    def size(drift: float, seed: int) -> float:
        """The size of the changes, in whole snapshots."""
        writer, chunks = Writer(2, seed), CHUNKS[0]
        writer.grow(500, drift=0)
        base = writer.kv.cut(1, 500, chunks, MeanKey())
        writer.grow(516, drift=drift)
        return num_bytes(writer.kv.cut(1, 516, chunks, MeanKey(), base.version)) / num_bytes(base)

    still, turning, turned = (sum(size(drift, seed) for seed in range(10)) / 10 for drift in (0.0, 0.2, 5.0))
    assert still < turning < turned < 1.1


def test_what_lacks_its_base_is_refused_and_changes_nothing() -> None:
    writer, chunks = Writer(2), CHUNKS[0]
    snapshots: list[Snapshot] = []
    for position in (300, 310, 320, 330):
        writer.grow(position, drift=1.0)
        snapshots.append(writer.kv.cut(1, position, chunks, MeanKey(), len(snapshots)))
    assert [s.changes and s.changes.base for s in snapshots] == [None, 1, 2, 3]
    kv = reader(writer, chunks.budget)
    assert not kv.take(snapshots[1]), "nothing is here"
    assert kv.confirmed(1) == 0
    assert kv.take(snapshots[0])
    assert not kv.take(snapshots[2])
    assert kv.confirmed(1) == 1
    held = seen(kv, 300)
    assert not kv.take(snapshots[2]), "nor once the first is installed"
    assert_same(seen(kv, 300), held)
    assert kv.take(snapshots[1])
    assert kv.take(snapshots[2]), "changes to changes, none of them installed yet"
    assert kv.take(snapshots[2]), "a repetition"
    assert not kv.take(snapshots[1]), "an older one"
    seen(kv, 320)
    assert kv.take(snapshots[2])
    assert kv.take(snapshots[3])
    fresh = reader(writer, chunks.budget)
    whole = replace(writer.kv.cut(1, 330, chunks, MeanKey()), version=4)
    fresh.deliver(whole)
    assert_same(seen(kv, 330), seen(fresh, 330))
    kv.release(1)
    assert kv.confirmed(1) == 0
    assert not kv.take(replace(snapshots[3], version=5))


def test_what_waits_is_bounded() -> None:
    """Changes that nobody installs are refused at some point, and so are snapshots of more tokens than the budget."""
    writer, chunks = Writer(2), CHUNKS[0]
    kv = reader(writer, chunks.budget)
    taken = []
    for position in range(300, 320):
        writer.grow(position, drift=0.1)
        taken.append(kv.take(writer.kv.cut(1, position, chunks, MeanKey(), kv.confirmed(1))))
    assert taken.count(True) == MAX_WAITING
    assert not any(taken[MAX_WAITING:])
    writer.grow(400, drift=0.1)
    assert kv.take(writer.kv.cut(1, 400, chunks, MeanKey())), "a whole one does away with them"
    seen(kv, 400)
    larger = replace(chunks, budget=chunks.budget + chunks.chunk)
    for base in (0, kv.confirmed(1)):
        longer = writer.kv.cut(1, 400, larger, MeanKey(), base)
        assert longer.num_tokens == larger.budget
        assert not kv.take(longer)


def test_chunks_keep_their_places() -> None:
    held = torch.tensor([[[7, 3, 5, 1], [0, 1, 2, 3]]])
    chosen = torch.tensor([[[1, 2, 3, 8], [4, 5, 6, 7]]])
    arranged, fresh = arrange(held, chosen, 9)
    assert arranged.tolist() == [[[2, 3, 8, 1], [4, 5, 6, 7]]]
    assert fresh.tolist() == [[[True, False, True, False], [True] * 4]]
    arranged, fresh = arrange(held, torch.tensor([[[1, 3, 7, 8, 9], [0, 1, 2, 3, 4]]]), 10)
    assert arranged.tolist() == [[[7, 3, 8, 1, 9], [0, 1, 2, 3, 4]]]
    arranged, fresh = arrange(held, torch.tensor([[[1, 3, 5], [0, 2, 3]]]), 8)
    assert arranged.tolist() == [[[1, 3, 5], [0, 3, 2]]], "of what was held beyond the last place nothing counts"
