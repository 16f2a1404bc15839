"""Edits equal transformers' logits processors where one exists, and their definitions where none does; and they depend
on the text alone, however it grew.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.random_models import random_tokens
from triforce_core.errors import InvalidValueError
from triforce_core.messages import SamplingParams, SequenceSpec
from triforce_core.sampling.edits import Edits

VOCAB, PROMPT_LENGTH = 12, 5
CPU = torch.device("cpu")
STOPS = (3, 7)

texts = st.lists(st.integers(0, VOCAB - 1), min_size=PROMPT_LENGTH, max_size=30)
words = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)
biases = st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=4).map(lambda d: tuple(d.items()))
samplings = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    min_tokens=st.sampled_from([0, 0, 3, 12]),
    logit_bias=biases,
    bad_word_ids=words,
)


def spec(sampling: SamplingParams) -> SequenceSpec:
    return SequenceSpec(sampling, 0, PROMPT_LENGTH, 100, STOPS)


def edited(sampling: SamplingParams, logits: Tensor, text: list[int], first: int) -> Tensor:
    rows = logits.clone()
    Edits(spec(sampling), VOCAB, CPU).apply(rows, first, text, 0)
    return rows


def by_definition(sampling: SamplingParams, logits: Tensor, text: list[int]) -> Tensor:
    """Logits [vocab] for the token after `text`: transformers' processors, and presence and frequency as OpenAI writes
    them.
    """
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    row = processors(torch.tensor([text]), logits[None].clone())[0]
    for token in range(VOCAB):
        count = text[PROMPT_LENGTH:].count(token)
        row[token] -= count * sampling.frequency_penalty + float(count > 0) * sampling.presence_penalty
    processors = LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias}))
    if sampling.bad_word_ids:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_word_ids]))
    processors.append(MinNewTokensLengthLogitsProcessor(PROMPT_LENGTH, sampling.min_tokens, list(STOPS)))
    return processors(torch.tensor([text]), row[None])[0]  # type: ignore[no-any-return]


@given(samplings, texts, st.integers(0, 10**6))
def test_equals_transformers(sampling: SamplingParams, text: list[int], seed: int) -> None:
    """The rows of one call are those of a block: each is for the text up to its own place."""
    logits = 3 * torch.randn(len(text) - PROMPT_LENGTH + 1, VOCAB, generator=torch.Generator().manual_seed(seed))
    rows = edited(sampling, logits, text, PROMPT_LENGTH)
    for index, row in enumerate(rows):
        expected = by_definition(sampling, logits[index], text[: PROMPT_LENGTH + index])
        torch.testing.assert_close(row, expected)


@given(samplings, st.lists(st.tuples(st.integers(0, 8), texts), min_size=2, max_size=6), st.integers(0, 10**6))
def test_a_text_that_is_cut_back_and_grows_leaves_no_trace(
    sampling: SamplingParams, changes: list[tuple[int, list[int]]], seed: int
) -> None:
    """Each change keeps some of the output and replaces the rest, as a rejected block does."""
    logits = 3 * torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(seed))
    edits, text = Edits(spec(sampling), VOCAB, CPU), list(range(PROMPT_LENGTH))
    for kept, new in changes:
        unchanged = min(len(text), PROMPT_LENGTH + kept)
        text = text[:unchanged] + new
        first = max(PROMPT_LENGTH, len(text) - 4)
        rows = logits[: len(text) - first + 1].clone()
        edits.apply(rows, first, text, unchanged)
        torch.testing.assert_close(rows, edited(sampling, logits[: len(rows)], text, first), rtol=0, atol=0)


def test_tokens_of_the_prompt_count_for_the_repetition_penalty_alone() -> None:
    logits, prompt = torch.ones(1, VOCAB), list(range(PROMPT_LENGTH))
    repeated = edited(SamplingParams(repetition_penalty=2.0), logits, prompt, PROMPT_LENGTH)[0]
    assert repeated.tolist() == [0.5] * PROMPT_LENGTH + [1.0] * (VOCAB - PROMPT_LENGTH)
    for sampling in (SamplingParams(presence_penalty=1.0), SamplingParams(frequency_penalty=1.0)):
        assert torch.equal(edited(sampling, logits, prompt, PROMPT_LENGTH), logits)


def test_a_bad_word_may_begin_in_the_prompt() -> None:
    sampling = SamplingParams(bad_word_ids=((3, 4, 9),))
    row = edited(sampling, torch.zeros(1, VOCAB), list(range(PROMPT_LENGTH)), PROMPT_LENGTH)[0]
    assert row.isinf().nonzero().flatten().tolist() == [9]


@pytest.mark.parametrize(
    ("field", "given_params"),
    [
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("repetition_penalty", {"repetition_penalty": float("nan")}),
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("frequency_penalty", {"frequency_penalty": -2.1}),
        ("min_tokens", {"min_tokens": -1}),
        ("logit_bias", {"logit_bias": ((5, 101.0),)}),
        ("logit_bias", {"logit_bias": ((5, float("nan")),)}),
        ("logit_bias", {"logit_bias": ((5, 1.0), (5, 2.0))}),
        ("logit_bias", {"logit_bias": tuple((i, 1.0) for i in range(1025))}),
        ("bad_words", {"bad_word_ids": ((),)}),
        ("bad_words", {"bad_word_ids": (random_tokens(65, seed=0),)}),
        ("bad_words", {"bad_word_ids": ((1,),) * 257}),
    ],
)
def test_values_out_of_range_are_named(field: str, given_params: dict[str, object]) -> None:
    with pytest.raises(InvalidValueError, match=f"^{field}: "):
        SamplingParams(**given_params)  # type: ignore[arg-type]
