"""Warping is transformers' own, except that ties go to the lower vocabulary id and temperature 0 changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from triforce_core.messages import GREEDY, SamplingParams
from triforce_core.sampling.warp import warp

samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 50, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.05, 0.3, 1.0]),
)


def theirs(logits: Tensor, params: SamplingParams) -> Tensor:
    """The processors that `generate` would build, in its order."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(torch.zeros(len(logits), 1, dtype=torch.long), logits)  # type: ignore[no-any-return]


@example([SamplingParams(), SamplingParams(0.5, top_k=7)], 136, 10)  # all mass but 1e-8 is in two tokens
@given(st.lists(samplings, min_size=1, max_size=4), st.integers(0, 10**6), st.sampled_from([1, 2, 10, 300]))
def test_equals_transformers(params: list[SamplingParams], seed: int, vocab: int) -> None:
    """Row by row, though ours warps rows of different parameters together."""
    logits = 3 * torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(seed))
    ours = warp(logits, params)
    for row, row_params in enumerate(params):
        expected = theirs(logits[row : row + 1].clone(), row_params)[0]
        torch.testing.assert_close(ours[row], expected)


@given(st.lists(samplings | st.just(GREEDY), min_size=2, max_size=5), st.integers(0, 10**6))
def test_a_row_is_warped_alike_alone_and_in_a_batch(params: list[SamplingParams], seed: int) -> None:
    logits = torch.randn(len(params), 100, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    together = warp(logits, params)
    assert torch.equal(logits, before), "the caller's logits stay as they were"
    for row, row_params in enumerate(params):
        assert torch.equal(together[row], warp(logits[row : row + 1], [row_params])[0])


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=2), [1, 2]),
        (SamplingParams(top_p=0.5), [1, 2]),
        (SamplingParams(top_k=3, top_p=0.6), [1, 2]),
        (SamplingParams(min_p=1.0), [1, 2, 4, 5]),
        (SamplingParams(top_k=1), [1]),
        (SamplingParams(top_p=1e-9), [1]),
    ],
)
def test_of_equal_logits_the_lower_ids_stay(params: SamplingParams, kept: list[int]) -> None:
    """Four equal tokens of probability .25 each, among others that have none."""
    logits = torch.tensor([[-50.0, 2.0, 2.0, -50.0, 2.0, 2.0]])
    assert warp(logits, [params])[0].isfinite().nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("params", [SamplingParams(top_k=500), SamplingParams(top_p=0.5)], ids=str)
def test_a_thousand_equal_logits_are_cut_by_id(params: SamplingParams) -> None:
    """bfloat16 logits tie all the time; a vocabulary this large is sorted by another algorithm than a small one."""
    kept = warp(torch.zeros(1, 1000), [params])[0].isfinite().nonzero().flatten().tolist()
    assert kept == list(range(500))


def test_temperature_0_leaves_the_row_as_it_is() -> None:
    logits = torch.randn(2, 50)
    truncating = SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=0.5)
    assert torch.equal(warp(logits, [truncating, GREEDY]), logits)


def test_one_token_always_survives() -> None:
    logits = torch.randn(20, 50)
    smallest = 1e-60  # 0 in float32
    for harsh in (SamplingParams(100, 1, 1e-12, 1), SamplingParams(top_p=smallest), SamplingParams(min_p=1)):
        warped = warp(logits, [harsh] * 20)
        assert torch.equal(warped.isfinite().sum(-1), torch.ones(20, dtype=torch.long))
        assert torch.equal(warped.argmax(-1), logits.argmax(-1))
