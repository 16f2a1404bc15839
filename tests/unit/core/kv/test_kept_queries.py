"""The kept queries of a text are those that its last passes computed, however passes and rejected drafts fall."""

from __future__ import annotations

import random

import pytest
import torch

from triforce_core.kv.kept_queries import KeptQueries

LAYERS, HEADS, DIM = 2, 3, 4


@pytest.mark.parametrize("seed", range(20))
def test_they_are_those_of_the_last_pass_over_each_position(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    kept, end = KeptQueries(LAYERS), 0
    dense = torch.empty(LAYERS, HEADS, 0, DIM)  # of every position, what was computed last
    joined = 0
    for _ in range(60):
        known = kept.positions.start
        keep = max(0, end - rng.choice([0, 0, 1, 2, 5, 20]))
        first_known = known if known <= keep <= kept.positions.stop else keep
        end = keep + rng.choice([1, 1, 1, 3, 9, 40])
        first = max(first_known, end - rng.choice([1, 8, 20]))
        kept.expect(first, keep, end, first_known)
        computed = torch.randn(LAYERS, HEADS, end - keep, DIM, generator=generator)
        dense = torch.cat([dense[:, :, :keep], computed], dim=2)
        for layer in range(LAYERS):
            waiting = kept.pieces(layer, first_known, keep)
            assert torch.equal(torch.cat([*waiting, computed[layer]], dim=1), dense[layer][:, first_known:])
            kept.take(layer, computed[layer], end - keep)
            assert torch.equal(kept.of(layer), dense[layer][:, first:])
        joined += len(kept.pieces(0, first, end)) > 1
    assert joined > 5, "queries of several passes were meant to be joined"


def test_a_few_queries_of_a_long_pass_do_not_keep_the_memory_of_all() -> None:
    kept = KeptQueries(1)
    kept.expect(2040, 0, 2048)
    kept.take(0, torch.randn(HEADS, 2048, DIM), 2048)
    assert kept.of(0).untyped_storage().nbytes() == HEADS * 8 * DIM * 4


def test_rejected_drafts_take_no_memory() -> None:
    """Each pass is over ten tokens, of which one is accepted. The queries of 64 tokens are kept."""
    kept = KeptQueries(1)
    for position in range(200):
        kept.expect(max(0, position - 54), position, position + 10)
        kept.take(0, torch.randn(HEADS, 10, DIM), 10)
        queries = [each.layers[0] for each in kept.passes]
        bound = HEADS * DIM * 4 * (64 + 10)
        assert sum(each.untyped_storage().nbytes() for each in queries if each is not None) <= bound


def test_those_of_a_short_pass_are_not_copied() -> None:
    """A pass of one token must cost nothing: snapshots are cut after few of them."""
    kept = KeptQueries(1)
    for position in range(20):
        kept.expect(max(0, position - 7), position, position + 1)
        queries = torch.randn(HEADS, 1, DIM)
        kept.take(0, queries, 1)
        assert kept.pieces(0, position, position + 1)[0].data_ptr() == queries.data_ptr()
        assert len(kept.passes) <= 8
