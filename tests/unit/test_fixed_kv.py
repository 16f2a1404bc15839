"""A pass of constant shape is an ordinary pass: the same attention, the same KV in the pool, whatever fills it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.random_models import random_tokens
from tests.stating import spec
from triforce_core.attention import KERNELS
from triforce_core.attention.ranged import gathered
from triforce_core.kv.base import Batch, Forward, KVGeometry
from triforce_core.kv.fixed import FixedBatch, FixedKV, PassShape
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.snapshot import Snapshot
from triforce_core.kv.streaming import StreamingKV, WindowSettings
from triforce_core.messages import Span

KV_HEADS, GROUP, HEAD_DIM, LAYERS = 2, 2, 8, 2
GEOMETRY = KVGeometry(LAYERS, KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
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
    return RetrievalKV(GEOMETRY, MAX_SEQUENCES, 24, 20, KERNELS["reference"])


def long_retrieval() -> RetrievalKV:
    """Long enough to be read in several pieces."""
    return RetrievalKV(GEOMETRY, MAX_SEQUENCES, 600, 20, KERNELS["reference"])


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Twins:
    """Two caches with the same history: one runs passes of constant shape where they fit, the other never does."""

    def __init__(self, make: Callable[[], FixedKV]) -> None:
        self.ordinary, self.fixed = make(), make()
        for kv in (self.ordinary, self.fixed):
            for pool in (*kv.keys, *kv.values):
                pool.fill_(torch.nan)  # what was never written is never read
        self.pass_ = FixedBatch(self.fixed, SHAPE, gathered, workers=100)
        self.texts: dict[int, tuple[int, ...]] = {}
        self.versions = 0
        self.compared = 0  # rows of passes that fitted

    def state(self, passed: list[Statement]) -> None:
        """One pass over these, in both."""
        forwards = []
        for s in passed:
            if s.fresh:
                self.renew(s.sequence)
            text = self.texts.get(s.sequence, ())
            text = text[: max(0, len(text) - s.rolled_back)]
            text += random_tokens(s.grown, seed=len(text) + s.sequence)
            self.texts[s.sequence] = text
            forwards.append(Forward(Span(s.sequence, 0, text, spec(1000)), min(s.sampled, s.grown)))
        batch, twin = self.ordinary.prepare(forwards), self.fixed.prepare(forwards)
        assert [row.placed for row in batch.rows] == [row.placed for row in twin.rows]
        self.attend(batch, twin)

    def renew(self, sequence: int) -> None:
        text = self.texts.get(sequence, ())
        if isinstance(self.ordinary, RetrievalKV) and text:
            self.versions += 1
            keys, values = normal(self.versions, 2, LAYERS, KV_HEADS, self.ordinary.budget, HEAD_DIM)
            for kv in (self.ordinary, self.fixed):
                assert isinstance(kv, RetrievalKV)
                kv.deliver(Snapshot(sequence, self.versions, len(text), keys, values))
        else:
            self.texts.pop(sequence, None)
            for kv in (self.ordinary, self.fixed):
                kv.release(sequence)

    def attend(self, batch: Batch, twin: Batch) -> None:
        """Both attend to the same queries, keys and values; where the shape has tokens of its own, garbage."""
        if not batch.rows:
            return
        fits = SHAPE.has_room(twin)
        tokens = [t for row in batch.rows for t in range(row.first, row.stop)]
        places = [i * SHAPE.queries + t for i, row in enumerate(twin.rows) for t in range(row.stop - row.first)]
        if fits:
            self.pass_.load(twin)
            self.pass_.unpack()
            self.check_inputs(twin, places)
        for layer in range(LAYERS):
            seed = 1000 * layer + len(tokens)
            packed = [
                normal(seed + i, n, len(tokens), HEAD_DIM) for i, n in enumerate((KV_HEADS * GROUP, *[KV_HEADS] * 2))
            ]
            expected = self.ordinary.attend(layer, *packed, 0.3, batch)
            if not fits:
                found = self.fixed.attend(layer, *packed, 0.3, twin)
            else:
                spread = [1e4 * normal(seed, len(x), SHAPE.tokens, HEAD_DIM) for x in packed]
                for wide, x in zip(spread, packed, strict=True):
                    wide[:, places] = x
                output = self.pass_.attend(layer, *spread, 0.3, twin)
                assert output.isfinite().all()
                found = output[places]
                self.compared += len(batch.rows)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
            for ours, theirs in ((self.fixed.keys, self.ordinary.keys), (self.fixed.values, self.ordinary.values)):
                own = torch.arange(ours[layer].shape[1]) != self.fixed.dump_slot
                torch.testing.assert_close(ours[layer][:, own], theirs[layer][:, own], atol=0, rtol=0, equal_nan=True)

    def check_inputs(self, batch: Batch, places: list[int]) -> None:
        assert self.pass_.token_ids[places].tolist() == [t for row in batch.rows for t in row.placed.tokens]
        assert self.pass_.positions[places].tolist() == [p for row in batch.rows for p in row.placed.positions]
        sampled = [places[t] for row in batch.rows for t in range(row.stop - row.num_sampled, row.stop)]
        assert self.pass_.sampled[: len(sampled)].tolist() == sampled


@pytest.mark.parametrize("make", [streaming, retrieval, long_retrieval])
@given(histories)
def test_any_history(make: Callable[[], FixedKV], history: list[list[Statement]]) -> None:
    """Growth, rollback, moved windows, snapshots, sequences that come and go, in batches of any mixture."""
    twins = Twins(make)
    assert (twins.pass_.splits > 1) == (make is long_retrieval)
    for passed in history:
        twins.state(passed)


@pytest.mark.parametrize("make", [streaming, retrieval])
def test_a_long_history_has_passes_that_fit_and_others(make: Callable[[], FixedKV]) -> None:
    twins = Twins(make)
    for i in range(60):
        twins.state([Statement(s, i % (s + 2), 1 + (i + s) % 5, 1, i in (1, 20 + s)) for s in range(3)])
    assert 50 < twins.compared < 60 * 3 * LAYERS


def test_the_dump_slot_is_nobodys() -> None:
    kv = streaming()
    for sequence in range(MAX_SEQUENCES):
        assert kv.open(sequence, spec(1000)) is not None
    owned = [slot for held in kv.held.values() for start, stop in held.ranges for slot in range(start, stop)]
    assert len(owned) == len(set(owned)) == MAX_SEQUENCES * kv.slots_each
    assert kv.dump_slot not in owned
    assert 0 <= kv.dump_slot < kv.keys[0].shape[1]
