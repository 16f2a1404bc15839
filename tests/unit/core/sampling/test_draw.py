"""Drawing: the exact distribution, over positions and over seeds, and the same token whoever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from triforce_core.messages import GREEDY, SamplingParams
from triforce_core.sampling.draw import Draw, draw_tokens, perturbed_logits
from triforce_core.sampling.noise import gumbel, row_keys
from triforce_core.sampling.warp import warp

LOGITS = torch.tensor([1.3, -0.4, 0.0, 2.1, -3.0, 0.9, 0.9, -1.2])

samplings = st.sampled_from(
    [GREEDY, SamplingParams(), SamplingParams(0.6, top_p=0.9), SamplingParams(1.3, top_k=5), SamplingParams(min_p=0.1)]
)
draws = st.builds(Draw, samplings, seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**20))


@given(st.lists(draws, min_size=2, max_size=8), st.integers(0, 10**6))
def test_a_row_draws_the_same_alone_and_in_a_batch(batch: list[Draw], seed: int) -> None:
    logits = torch.randn(len(batch), 77, generator=torch.Generator().manual_seed(seed))
    together = perturbed_logits(logits, batch)
    tokens = draw_tokens(logits, batch)
    for row, draw in enumerate(batch):
        assert torch.equal(perturbed_logits(logits[row : row + 1], [draw])[0], together[row])
        assert draw_tokens(logits[row : row + 1], [draw]) == tokens[row : row + 1]


@given(draws, st.integers(0, 10**6))
def test_truncation_that_excludes_nothing_changes_nothing(draw: Draw, seed: int) -> None:
    """Noise belongs to the vocabulary id, not to the rank or the number of survivors."""
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(seed))
    free = SamplingParams(draw.sampling.temperature)
    kept = warp(logits, [draw.sampling])[0].isfinite()
    whole = perturbed_logits(logits, [Draw(free, draw.seed, draw.position)])[0]
    assert torch.equal(perturbed_logits(logits, [draw])[0][kept], whole[kept])


@pytest.mark.parametrize("over", ["positions", "seeds"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(0.6),
        SamplingParams(1.3, top_p=0.9),
        SamplingParams(1.0, top_k=3),
        SamplingParams(0.8, min_p=0.2),
        SamplingParams(1.1, top_k=6, top_p=0.85, min_p=0.05),
    ],
    ids=str,
)
def test_tokens_follow_the_warped_law(params: SamplingParams, over: str) -> None:
    count = 20_000
    rows = [Draw(params, 42, i) if over == "positions" else Draw(params, i, 42) for i in range(count)]
    counts = torch.bincount(torch.tensor(draw_tokens(LOGITS.expand(count, -1), rows)), minlength=len(LOGITS))
    probabilities = warp(LOGITS[None], [params])[0].double().softmax(-1)
    assert not counts[probabilities == 0].any(), "an excluded token was drawn"
    alive = probabilities > 0
    if alive.sum() > 1:
        assert stats.chisquare(counts[alive].numpy(), (probabilities[alive] * count).numpy()).pvalue > 1e-4


def test_temperature_0_is_the_argmax_and_the_lowest_id_wins_a_tie() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [5.0, 1.0, 5.0, 5.0], [-2.0, -2.0, -2.0, -2.0]])
    rows = [Draw(GREEDY, seed, position=seed) for seed in range(3)]
    assert draw_tokens(logits, rows) == [1, 0, 0]
    mixed = [*rows, Draw(SamplingParams(), 1, 1)]  # beside a row with noise the path is another
    assert draw_tokens(torch.cat([logits, torch.zeros(1, 4)]), mixed)[:3] == [1, 0, 0]
    wide = torch.zeros(1, 100_000).index_fill_(1, torch.tensor([70_001, 99_999]), 1.0)
    assert draw_tokens(wide, rows[:1]) == [70_001]


def test_low_precision_logits_are_drawn_as_their_float32_values() -> None:
    logits = torch.randn(50, 40).bfloat16()
    rows = [Draw(SamplingParams(), 3, position) for position in range(50)]
    assert draw_tokens(logits, rows) == draw_tokens(logits.float(), rows)


def test_nothing_to_draw() -> None:
    assert draw_tokens(torch.empty(0, 8), []) == []


def test_the_noise_is_that_of_the_draw_s_seed_and_position() -> None:
    """Every tier must add the same noise to a row, whatever else is in its batch. Greedy rows have no noise."""
    draws = [Draw(SamplingParams(), 5, 9), Draw(GREEDY, 1, 2), Draw(SamplingParams(), 2**62, 3)]
    found = perturbed_logits(torch.zeros(3, 4), draws)
    for row, draw in zip(found, draws, strict=True):
        first, second = row_keys(torch.tensor(draw.seed), torch.tensor(draw.position))
        noise = gumbel(first, second, torch.arange(4))
        torch.testing.assert_close(row, noise if draw.sampling.temperature else torch.zeros(4, dtype=torch.float64))
