"""A pass of constant shape is an ordinary pass: the same attention, the same KV in the pool, the same queries kept,
whatever fills it up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.random_models import random_tokens
from tests.stating import spec
from triforce_core.attention import KERNELS, Scoring
from triforce_core.attention.ranged import gathered
from triforce_core.kv.base import Batch, Forward, KVGeometry, Windows, joined
from triforce_core.kv.fixed import FixedKV
from triforce_core.kv.full import FullKV
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.shaped import PassShape, ShapedBatch, VerifyBatch
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.kv.streaming import StreamingKV, WindowSettings
from triforce_core.kv.text_slots import MOST_RANGES
from triforce_core.messages import Span

KV_HEADS, GROUP, HEAD_DIM, LAYERS = 2, 2, 8, 2
GEOMETRY = KVGeometry(LAYERS, KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
WINDOWED = replace(GEOMETRY, windows=Windows(7, frozenset({1})))
SCORING = [Scoring(0.3), Scoring(0.3, torch.tensor([0.5, -1, 2, 0]))]  # by layer
SHAPE = PassShape(sequences=4, queries=5)
MAX_SEQUENCES = 3  # fewer than the shape has room for


class Statement(NamedTuple):
    """What becomes of a sequence before it is stated in a pass."""

    sequence: int
    rolled_back: int
    grown: int
    sampled: int
    fresh: bool  # it is released and begins anew; in a cache of snapshots, it gets one


statements = st.builds(
    Statement,
    st.integers(0, 3),
    st.integers(0, 6),
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from([False, True]),
)
histories = st.lists(st.lists(statements, min_size=1, max_size=4, unique_by=lambda s: s.sequence), max_size=12)


def streaming() -> StreamingKV:
    return StreamingKV(GEOMETRY, MAX_SEQUENCES, WindowSettings(2, 8, 6), KERNELS["reference"])


def retrieval() -> RetrievalKV:
    return RetrievalKV(GEOMETRY, MAX_SEQUENCES, ChunkSettings(24), 20, KERNELS["reference"])


def long_retrieval() -> RetrievalKV:
    """Long enough to be read in several pieces."""
    return RetrievalKV(GEOMETRY, MAX_SEQUENCES, ChunkSettings(600), 20, KERNELS["reference"])


def full() -> FullKV:
    """Sequences are of different lengths, so that the pool becomes fragmented."""
    return FullKV(GEOMETRY, length_of(0) + length_of(1) + length_of(2) // 2, KERNELS["reference"])


def retrieval_in_window() -> RetrievalKV:
    return RetrievalKV(WINDOWED, MAX_SEQUENCES, ChunkSettings(24, 3), 20, KERNELS["reference"])


def full_in_window() -> FullKV:
    return FullKV(WINDOWED, full().dump_slot, KERNELS["reference"])


def length_of(sequence: int) -> int:
    return 100 + 30 * sequence


def shaped(kv: FixedKV | FullKV) -> ShapedBatch:
    if isinstance(kv, FixedKV):
        return ShapedBatch(kv, SHAPE, kv.slots_each, gathered, workers=100)
    queries = torch.full((LAYERS, KV_HEADS * GROUP, SHAPE.tokens + 3, HEAD_DIM), torch.nan)
    return VerifyBatch(kv, SHAPE, 600, gathered, 100, queries)  # in two pieces, for a sequence may lie in two ranges


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Both:
    """Two caches with the same history: one runs passes of constant shape where they fit, the other never does."""

    def __init__(self, make: Callable[[], FixedKV | FullKV], selector: str = "mean_key") -> None:
        self.selector = selector
        self.ordinary, self.fixed = make(), make()
        for kv in (self.ordinary, self.fixed):
            for pool in (*kv.keys, *kv.values):
                pool.fill_(torch.nan)  # what was never written is never read
        self.pass_ = shaped(self.fixed)
        self.texts: dict[int, tuple[int, ...]] = {}
        self.versions = 0
        self.compared = 0  # rows of passes that fitted
        self.counted = 0  # tokens whose attention is counted, of all layers of a sequence
        self.fragmented = 0  # of these, the ones whose sequence lies in several ranges

    def state(self, passed: list[Statement]) -> None:
        """Run one pass over these statements in both caches."""
        forwards = []
        for s in passed:
            if s.fresh:
                self.renew(s.sequence)
            text = self.texts.get(s.sequence, ())
            text = text[: max(0, len(text) - s.rolled_back)]
            text += random_tokens(s.grown, seed=len(text) + s.sequence)
            self.texts[s.sequence] = text
            of_sequence = replace(spec(length_of(s.sequence)), selector=self.selector)
            forwards.append(Forward(Span(s.sequence, 0, text, of_sequence), min(s.sampled, s.grown)))
        batch, fixed = self.ordinary.prepare(forwards), self.fixed.prepare(forwards)
        assert [row.placed for row in batch.rows] == [row.placed for row in fixed.rows]
        self.attend(batch, fixed)

    def renew(self, sequence: int) -> None:
        text = self.texts.get(sequence, ())
        if isinstance(self.ordinary, RetrievalKV) and text:
            self.versions += 1
            keys, values = normal(self.versions, 2, LAYERS, KV_HEADS, self.ordinary.chunks.budget, HEAD_DIM)
            for kv in (self.ordinary, self.fixed):
                assert isinstance(kv, RetrievalKV)
                kv.deliver(Snapshot(sequence, self.versions, len(text), keys, values))
        else:
            self.forget(sequence)

    def forget(self, sequence: int) -> None:
        self.texts.pop(sequence, None)
        for kv in (self.ordinary, self.fixed):
            kv.release(sequence)

    def attend(self, batch: Batch, fixed: Batch) -> None:
        """Both caches attend to the same queries, keys and values. Where the shape has more tokens, these are
        garbage.
        """
        if not batch.rows:
            return
        fits = self.pass_.has_room(fixed)
        tokens = [t for row in batch.rows for t in range(row.first, row.stop)]
        places = [i * SHAPE.queries + t for i, row in enumerate(fixed.rows) for t in range(row.stop - row.first)]
        if fits:
            self.pass_.load(fixed)
            self.pass_.unpack()
            self.check_inputs(fixed, places)
        for layer in range(LAYERS):
            seed = 1000 * layer + len(tokens)
            packed = [
                normal(seed + i, n, len(tokens), HEAD_DIM) for i, n in enumerate((KV_HEADS * GROUP, *[KV_HEADS] * 2))
            ]
            expected = self.ordinary.attend(layer, *packed, SCORING[layer], batch)
            if not fits:
                found = self.fixed.attend(layer, *packed, SCORING[layer], fixed)
            else:
                spread = [1e4 * normal(seed, len(x), SHAPE.tokens, HEAD_DIM) for x in packed]
                for wide, x in zip(spread, packed, strict=True):
                    wide[:, places] = x
                output = self.pass_.attend(layer, *spread, SCORING[layer], fixed)
                assert output.isfinite().all()
                found = output[places]
                self.compared += len(batch.rows)
                self.fragmented += sum(len(joined([], row.placed.visible)) > 1 for row in batch.rows)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            for ours, theirs in ((self.fixed.keys, self.ordinary.keys), (self.fixed.values, self.ordinary.values)):
                own = torch.arange(ours[layer].shape[1]) != self.fixed.dump_slot
                torch.testing.assert_close(ours[layer][:, own], theirs[layer][:, own], atol=0, rtol=0, equal_nan=True)
        if fits:
            self.pass_.settle(fixed)
            if isinstance(self.pass_, VerifyBatch):
                self.pass_.queries.fill_(torch.nan)  # what is kept is nobody else's
        self.check_queries(batch)

    def check_queries(self, batch: Batch) -> None:
        if isinstance(self.ordinary, FullKV) and isinstance(self.fixed, FullKV):
            for row in batch.rows:
                theirs, ours = self.ordinary.held[row.sequence_id], self.fixed.held[row.sequence_id]
                assert ours.queries.positions == theirs.queries.positions
                for layer in range(LAYERS):
                    torch.testing.assert_close(ours.queries.of(layer), theirs.queries.of(layer), atol=0, rtol=0)
                torch.testing.assert_close(ours.mass, theirs.mass, atol=1e-5, rtol=0)
                self.counted = max(self.counted, sum(mass.shape[1] for mass in theirs.mass.values()))

    def check_inputs(self, batch: Batch, places: list[int]) -> None:
        assert self.pass_.token_ids[places].tolist() == [t for row in batch.rows for t in row.placed.tokens]
        assert self.pass_.positions[places].tolist() == [p for row in batch.rows for p in row.placed.positions]
        sampled = [places[t] for row in batch.rows for t in range(row.stop - row.num_sampled, row.stop)]
        assert self.pass_.sampled[: len(sampled)].tolist() == sampled


@pytest.mark.parametrize("make", [streaming, retrieval, long_retrieval, retrieval_in_window, full, full_in_window])
@given(histories)
def test_any_history(make: Callable[[], FixedKV | FullKV], history: list[list[Statement]]) -> None:
    """Sequences grow, are rolled back, come and go; windows move and snapshots come. Batches are of any mixture."""
    both = Both(make)
    assert (both.pass_.rooms[0].splits > 1) == (make in (long_retrieval, full, full_in_window))
    for passed in history:
        both.state(passed)


@pytest.mark.ci
@pytest.mark.parametrize("selector", ["snapkv", "h2o"])
@given(histories)
def test_selectors_find_the_same_queries_and_the_same_mass(selector: str, history: list[list[Statement]]) -> None:
    both = Both(full, selector)
    for passed in history:
        both.state(passed)


def test_the_attention_of_passes_of_constant_shape_is_counted() -> None:
    both = Both(full, "h2o")
    for i in range(30):
        both.state([Statement(2, min(i, 2), 5, 3, fresh=False)])
    assert both.compared == 30 * LAYERS
    assert both.counted >= LAYERS * 64


@pytest.mark.parametrize("make", [streaming, retrieval, full, full_in_window])
def test_a_long_history_has_passes_that_fit_and_others(make: Callable[[], FixedKV | FullKV]) -> None:
    both = Both(make)
    for i in range(60):
        both.state([Statement(s, i % (s + 2), 1 + (i + s) % 5, 1, i in (1, 20 + s)) for s in range(3)])
    assert 50 < both.compared < 60 * 3 * LAYERS


def test_a_sequence_in_several_ranges() -> None:
    both = Both(full)
    both.state([Statement(s, 0, 60, 1, False) for s in (0, 1)])
    both.forget(0)
    both.state([Statement(2, 0, 120, 1, False)])  # where the first one was, and behind the second
    for i in range(12):
        both.state([Statement(s, i % 3, 1 + i % 5, 1, False) for s in (1, 2)])
    assert both.fragmented == 12 * LAYERS


def test_a_sequence_in_more_ranges_than_pieces_or_longer_than_is_read_does_not_fit() -> None:
    kv = full()
    batch = kv.prepare([Forward(Span(0, 0, random_tokens(60, seed=0), spec(100)), 1)])
    queries = torch.empty(LAYERS, KV_HEADS * GROUP, 5, HEAD_DIM)
    roomy, narrow = (VerifyBatch(kv, PassShape(1, 5), most, gathered, 4, queries) for most in (600, 50))
    assert not roomy.has_room(batch), "60 tokens are more than 5"
    batch = kv.prepare([Forward(Span(0, 0, random_tokens(63, seed=0), spec(100)), 1)])
    assert roomy.has_room(batch)
    assert not narrow.has_room(batch)
    [row] = batch.rows
    batch.rows = [replace(row, placed=replace(row.placed, visible=[(20 * i, 20 * i + 10) for i in range(MOST_RANGES)]))]
    assert roomy.rooms[0].splits == MOST_RANGES
    assert roomy.has_room(batch)
    batch.rows = [
        replace(row, placed=replace(row.placed, visible=[(20 * i, 20 * i + 9) for i in range(MOST_RANGES + 1)]))
    ]
    assert not roomy.has_room(batch)


@pytest.mark.parametrize("make", [streaming, full])
def test_the_dump_slot_is_nobodys(make: Callable[[], FixedKV | FullKV]) -> None:
    kv = make()
    sequences = [*range(MAX_SEQUENCES)] if isinstance(kv, FixedKV) else [0, 1]
    for sequence in sequences:
        assert kv.open(sequence, spec(length_of(sequence))) is not None
    for start in range(kv.allocator.num_free):  # and what is left, slot by slot
        assert kv.open(100 + start, spec(1)) is not None
    owned = [slot for held in kv.held.values() for start, stop in held.ranges for slot in range(start, stop)]
    assert sorted(owned) == [*range(kv.allocator.num_slots)]
    assert kv.dump_slot not in owned
    assert 0 <= kv.dump_slot < kv.keys[0].shape[1]
