"""Layers with a window: each token sees the last tokens of its text alone, however the text is cut into passes and
wherever it lies in the pool, and the learned sinks take their share.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.stating import spec
from triforce_core.attention import KERNELS, Scoring
from triforce_core.attention.blocks import BLOCK
from triforce_core.kv.base import Forward, KVGeometry, Windows
from triforce_core.kv.full import FullKV
from triforce_core.kv.offloaded import Offload, OffloadedKV
from triforce_core.kv.selectors import SELECTORS
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.messages import Span

HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 8, 0.4
LAYERS, SLIDING = 3, 2  # the layer with a window; offloaded, it is staged where the first one is
SINKS = torch.tensor([0.5, -1, 2, 0])
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def geometry(window: int, dtype: torch.dtype = torch.float32) -> KVGeometry:
    windows = Windows(window, frozenset({SLIDING}))
    return KVGeometry(LAYERS, KV_HEADS, HEAD_DIM, dtype, torch.device("cpu"), windows)


class Text:
    """The queries, keys and values of a text in all layers."""

    def __init__(self, length: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.query = torch.randn(LAYERS, HEADS, length, HEAD_DIM, generator=generator).to(dtype)
        self.keys, self.values = torch.randn(2, LAYERS, KV_HEADS, length, HEAD_DIM, generator=generator).to(dtype)
        self.tokens = tuple(range(length))

    def textbook(self, layer: int, window: int, sinks: Tensor | None) -> Tensor:
        """[tokens, heads, head_dim] float64."""
        keys, values = (
            each[layer].repeat_interleave(HEADS // KV_HEADS, 0).double() for each in (self.keys, self.values)
        )
        scores = self.query[layer].double() @ keys.mT * SCALE
        distance = torch.arange(len(self.tokens))[:, None] - torch.arange(len(self.tokens))
        seen = (distance >= 0) & (distance < (window if layer == SLIDING else len(self.tokens)))
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(self.tokens), 1)], dim=2)
        return (scores.softmax(-1)[..., : len(self.tokens)] @ values).transpose(0, 1)

    def passed(self, kv: FullKV, sequence: int, edges: list[int], sinks: Tensor | None) -> list[Tensor]:
        """By layer, the results of passes that end at these positions."""
        results: list[list[Tensor]] = [[] for _ in range(LAYERS)]
        for start, stop in pairwise([0, *edges]):
            batch = kv.prepare([Forward(Span(sequence, 0, self.tokens[:stop], spec(len(self.tokens))), 1)])
            for layer in range(LAYERS):
                own = (
                    self.query[layer][:, start:stop],
                    self.keys[layer][:, start:stop],
                    self.values[layer][:, start:stop],
                )
                results[layer].append(kv.attend(layer, *own, Scoring(SCALE, sinks), batch))
        return [torch.cat(each) for each in results]


def fragmented(kv: FullKV, length: int) -> None:
    """Open sequence 1 so that its text lies in several ranges."""
    slots = kv.allocator.num_slots
    kv.allocator.take([(8, 16), (40, 48), (slots - 48, slots)])
    kv.open(1, spec(length), length)
    assert len(kv.held[1].ranges) > 1


def opened(length: int, window: int, dtype: torch.dtype, **options: Any) -> FullKV:
    kv = FullKV(geometry(window, dtype), length + 64, KERNELS["cpu_flash"], unit=8, **options)
    for pool in kv.pools:
        pool.fill_(torch.nan)
    return kv


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("in_blocks", [False, True], ids=["kernel", "blocks"])
@pytest.mark.parametrize("in_ranges", [False, True], ids=["one range", "several"])
@given(st.sampled_from([1, 2, 5, 16, 33, 200]), st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_attention_is_that_of_the_textbook(
    sinks: Tensor | None, in_blocks: bool, in_ranges: bool, window: int, counts: list[int]
) -> None:
    edges = [sum(counts[: i + 1]) for i in range(len(counts))]
    edges[-1] = max(edges[-1], 64)
    text, kv = Text(edges[-1], len(edges)), opened(edges[-1], window, torch.float32, in_blocks=in_blocks)
    if in_ranges:
        fragmented(kv, edges[-1])
    for layer, found in enumerate(text.passed(kv, 1, edges, sinks)):
        expected = text.textbook(layer, window, sinks)
        torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[torch.float32], rtol=0)


@pytest.mark.parametrize("window", [100, BLOCK, BLOCK + 7, 2 * BLOCK])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_blocks_the_bits_of_a_token_do_not_depend_on_the_passes(dtype: torch.dtype, window: int) -> None:
    length, rng = 3 * BLOCK + 50, Random(window)
    text, results = Text(length, window, dtype), []
    for number in range(4):
        edges = sorted({length, *(rng.randrange(1, length) for _ in range(20 * number))})
        kv = opened(length, window, dtype, in_blocks=True)
        if number % 2:
            fragmented(kv, length)
        results.append(text.passed(kv, 1, edges, SINKS))
        if number == 3:  # token by token at the end, and with a second text that has the same beginning
            last = text.passed(
                opened(length, window, dtype, in_blocks=True), 1, [*range(length - 60, length + 1)], SINKS
            )
            results.append(last)
    for layer in range(LAYERS):
        expected = text.textbook(layer, window, SINKS)
        torch.testing.assert_close(results[0][layer].double(), expected, atol=TOLERANCE[dtype], rtol=0)
        for other in results[1:]:
            assert torch.equal(other[layer], results[0][layer])


@pytest.mark.parametrize("in_blocks", [False, True], ids=["kernel", "blocks"])
def test_an_offloaded_layer_with_a_window_is_attended_to_alike(in_blocks: bool) -> None:
    length, window = BLOCK + 300, 70
    text, edges = Text(length, 1), [400, 401, 650, length - 1, length]
    kv = OffloadedKV(geometry(window), length + 64, KERNELS["cpu_flash"], Offload(), unit=8, in_blocks=in_blocks)
    for pool in (*kv.pools, *(each.pool for each in kv.staging)):
        pool.fill_(torch.nan)
    ours = text.passed(kv, 1, edges, SINKS)
    theirs = text.passed(opened(length, window, torch.float32, in_blocks=in_blocks), 1, edges, SINKS)
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.equal(mine, expected)


def positions_of(keys: Tensor, text: Text, layer: int) -> list[int]:
    """Where in the text these keys [tokens, head_dim] of the first head are from."""
    same = (keys[:, None] == text.keys[layer][0]).all(-1)
    assert (same.sum(-1) == 1).all()
    return same.nonzero()[:, 1].tolist()


def test_snapshots_of_a_layer_with_a_window_have_its_latest_chunks_wherever_they_begin() -> None:
    """Also as changes to earlier ones, of which such layers need the newest chunks alone."""
    length, window, chunks = 400, 40, ChunkSettings.halved(96, 8)
    text, kv, near = Text(length, 3), opened(length, window, torch.float32), chunks.near(window)
    edges = [20, 50, 70, 100, 131, 200, 208, 209, 333, length]
    state, base, changed = torch.full((LAYERS, 96, HEAD_DIM), torch.nan), 0, 0
    for start, stop in pairwise([0, *edges]):
        kv_text = Span(1, 0, text.tokens[:stop], spec(length))
        batch = kv.prepare([Forward(kv_text, 1)])
        for layer in range(LAYERS):
            own = (each[layer][:, start:stop] for each in (text.query, text.keys, text.values))
            kv.attend(layer, *own, Scoring(SCALE), batch)
        snapshot = kv.cut(1, stop, chunks, SELECTORS["snapkv"](), base)
        kept = 0
        if snapshot.changes:
            kept = snapshot.changes.kept
            for (layer, head, place), keys in zip(snapshot.changes.places.tolist(), snapshot.changes.keys, strict=True):
                changed += layer == SLIDING
                if head == 0:
                    state[layer, place * 8 : place * 8 + 8] = keys
        state[:, kept : kept + snapshot.keys.shape[2]] = snapshot.keys[:, 0]
        base, total = snapshot.version, snapshot.num_tokens
        complete = total - stop % 8
        rest = state[SLIDING, complete:total]
        latest = positions_of(torch.cat([state[SLIDING, : min(complete, near * 8)], rest]), text, SLIDING)
        seen = range(max(0, stop - window), stop)
        assert {*seen} <= {*latest}, (stop, latest)
        assert len({*latest}) == len(latest) <= near * 8 + 8
        for layer in {*range(LAYERS)} - {SLIDING}:
            own = positions_of(state[layer, :total], text, layer)
            assert len({*own}) == total
            assert {*range(8), *range(max(0, stop - 40), stop)} <= {*own}
    assert 0 < changed <= KV_HEADS * (length // 8)
