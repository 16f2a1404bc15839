"""Texts are read in blocks of keys wherever they lie in the pool, and blocks that several texts share are read once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.random_models import random_model, random_tokens
from triforce_core.attention import KERNELS, Scoring
from triforce_core.attention.blocks import BLOCK
from triforce_core.kv.base import Forward
from triforce_core.kv.folds import MOST_QUERIES
from triforce_core.kv.full import FullKV
from triforce_core.kv.in_blocks import BlockReading, Group, Run, attend_in_blocks, groups_of, plan_blocks
from triforce_core.kv.offloaded import Offload, OffloadedKV
from triforce_core.kv.ranges import Range, size_of
from triforce_core.messages import GREEDY, SequenceSpec, Span
from triforce_core.models.load import ATTENTION, kv_geometry
from triforce_core.models.runner import ModelRunner

B, SCALE = BLOCK, 0.1
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32


def test_tokens_are_grouped_by_the_block_in_which_they_lie() -> None:
    text = [(0, B), (3 * B, 5 * B)]
    assert groups_of(7, range(B - 2, B + 3), text) == [
        Group(slice(7, 9), 0, B - 2, [(0, B)], text),
        Group(slice(9, 12), 1, 0, [(3 * B, 4 * B)], text),
    ]


def test_a_block_that_is_not_whole_ends_with_the_last_token() -> None:
    (group,) = groups_of(0, range(10, 12), [(8, 100)])
    assert group.own == [(8, 20)]


def planned(*texts: tuple[int, list[Range]], queries: int = 1) -> list[Run]:
    """What is read for `queries` tokens at each of these positions."""
    first, groups = 0, []
    for position, text in texts:
        groups += groups_of(first, range(position, position + queries), text)
        first += queries
    return plan_blocks(groups).runs


def test_blocks_that_follow_one_another_are_one_run() -> None:
    assert planned((3 * B + 5, [(8, 9 * B)])) == [Run(0, ((8, 3 * B + 8),), (0,))]
    assert planned((5, [(8, 9 * B)])) == []


def test_a_block_in_pieces_is_a_run_of_its_own() -> None:
    text = [(0, B + 100), (5 * B, 5 * B + 50), (9 * B, 12 * B)]
    assert planned((3 * B, text)) == [
        Run(0, ((0, B),), (0,)),
        Run(1, ((B, B + 100), (5 * B, 5 * B + 50), (9 * B, 10 * B - 150)), (0,)),
        Run(2, ((10 * B - 150, 11 * B - 150),), (0,)),
    ]


def test_what_texts_share_is_read_once() -> None:
    document = (0, 2 * B)
    first, second, third = [document, (4 * B, 6 * B)], [document, (8 * B, 9 * B)], [(10 * B, 13 * B)]
    assert planned((3 * B + 1, first), (2 * B + 9, second), (B, third)) == [
        Run(0, (document,), (0, 1)),
        Run(2, ((4 * B, 5 * B),), (0,)),
        Run(0, ((10 * B, 11 * B),), (2,)),
    ]
    alone = planned((2 * B, first), (2 * B, second), queries=MOST_QUERIES + 1)
    assert alone == [Run(0, (document,), (0,)), Run(0, (document,), (1,))]


def test_ranges_in_another_order_than_the_text_are_not_joined() -> None:
    """The second block lies right before the first one in the pool."""
    text = [(B, 2 * B), (0, B), (7 * B, 8 * B)]
    runs = planned((2 * B, text), (2 * B + 1, text))
    assert runs == [Run(0, ((B, 2 * B),), (0, 1)), Run(1, ((0, B),), (0, 1))]


def test_the_share_of_keys_that_is_read() -> None:
    runs = [Run(0, ((0, 2 * B),), (0, 1)), Run(2, ((4 * B, 5 * B),), (0,))]
    assert BlockReading([], runs).share == pytest.approx(3 / 5)
    assert BlockReading([], []).share == 1


class Pool:
    """Texts with the same first keys, in slots of a pool."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(0)
        self.query = torch.randn(HEADS, length, HEAD_DIM, generator=random).to(dtype)
        self.text = torch.randn(2, KV_HEADS, length, HEAD_DIM, generator=random).to(dtype)
        self.pool = torch.full((2, KV_HEADS, 4 * length, HEAD_DIM), torch.nan, dtype=dtype)

    def put(self, ranges: list[Range]) -> None:
        """The text into these slots; slots behind its end hold numbers, as in a cache."""
        first = 0
        for start, stop in ranges:
            some = self.text[:, :, first : first + stop - start]
            self.pool[:, :, start:stop] = 3
            self.pool[:, :, start : start + some.shape[2]] = some
            first += stop - start

    def attend(self, texts: list[tuple[range, list[Range]]]) -> list[Tensor]:
        """The results of these tokens of each text, in one pass, with a padding token behind them."""
        query = torch.cat([*(self.query[:, at.start : at.stop] for at, _ in texts), self.query[:, :1]], dim=1)
        first, groups = 0, []
        for at, ranges in texts:
            groups += groups_of(first, at, ranges)
            first += len(at)
        found = attend_in_blocks(query, self.pool[0], self.pool[1], Scoring(SCALE), plan_blocks(groups))
        assert not found[-1].any()
        return [*found[:-1].split([len(at) for at, _ in texts])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_bits_depend_neither_on_the_slots_nor_on_who_reads_along(dtype: torch.dtype) -> None:
    length = 2 * B + 200
    pool = Pool(length, dtype)
    whole = [(0, 3 * B)]
    elsewhere = [(4 * B, 5 * B - 8), (3 * B, 3 * B + 64), (5 * B, 6 * B + 200)]
    shared = [(0, B + 80), (7 * B, 8 * B + 200)]
    assert min(map(size_of, (elsewhere, shared))) >= length
    pool.put(whole)
    pool.put(elsewhere)
    pool.put(shared)
    (expected,) = pool.attend([(range(length), whole)])
    tokens = [(range(length - 5, length), elsewhere), (range(B - 2, B + 2), shared), (range(length - 1, length), whole)]
    for some in (tokens, tokens[:1], tokens[::-1], [*tokens, (range(2 * B + 8, length), shared)]):
        for (at, _), found in zip(some, pool.attend(some), strict=True):
            assert torch.equal(found, expected[at.start : at.stop])


def test_bits_are_the_same_with_offload_whatever_its_buffers_have_held() -> None:
    """Slots behind a text may hold anything in a staging buffer, and what another text has left in the pool."""
    model = random_model().bfloat16()
    model.set_attn_implementation(ATTENTION)
    geometry, text = kv_geometry(model), random_tokens(B + 40, seed=0, vocab=model.config.vocab_size)
    resident = FullKV(geometry, 3 * B, KERNELS["cpu_flash"], unit=8, in_blocks=True)
    offloaded = OffloadedKV(geometry, 3 * B, KERNELS["cpu_flash"], Offload(), unit=8, in_blocks=True)
    for pool in (*resident.pools, *(each.pool for each in offloaded.staging)):
        pool.fill_(torch.nan)
    found = []
    for kv in (resident, offloaded):
        runner, spec = ModelRunner(model, kv), SequenceSpec(GREEDY, 0, 2 * B, 2 * B)
        kv.open(1, spec, 2 * B)
        for stop in (7, 300, B - 1, B + 1, len(text)):
            logits, _ = runner.forward([Forward(Span(1, 0, text[:stop], spec), 1)])
        found.append(logits)
    assert found[0].isfinite().all()
    assert torch.equal(*found)
