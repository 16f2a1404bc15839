"""Judging by equality, where a block ends, and which noise a token is drawn with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.random_models import random_pair, random_tokens
from tests.stating import geometry
from triforce_core.attention import KERNELS
from triforce_core.kv.base import Forward, KVCache
from triforce_core.kv.full import FullKV
from triforce_core.kv.streaming import StreamingKV, WindowSettings
from triforce_core.messages import GREEDY, Claim, SamplingParams, SequenceSpec, Span, Verdict, Work
from triforce_core.models.drawing import Drawer, by_sequence
from triforce_core.models.runner import ModelRunner
from triforce_core.sampling.noise import gumbel, row_keys
from triforce_core.speculation.drafting import ModelProposer
from triforce_core.speculation.verification import judge

STOP = 9


@pytest.mark.parametrize(
    ("own", "proposed", "max_length", "expected"),
    [
        ([1], (), 100, Verdict((1,), 0)),
        ([1, 2, 3], (1, 2), 100, Verdict((1, 2, 3), 2)),
        ([1, 5, 6], (1, 2), 100, Verdict((1, 5), 1)),
        ([5, 6, 7], (1, 2), 100, Verdict((5,), 0)),
        ([5, 2, 3], (1, 2), 100, Verdict((5,), 0)),
        ([1, STOP, 3], (1, STOP), 100, Verdict((1, STOP), 2, ended=True)),
        ([1, STOP, 3], (1, 2), 100, Verdict((1, STOP), 1, ended=True)),
        ([1, 2, STOP], (1, 2), 100, Verdict((1, 2, STOP), 2, ended=True)),
        ([STOP], (), 100, Verdict((STOP,), 0, ended=True)),
        ([1, 2, 3], (1, 2), 12, Verdict((1, 2), 2, ended=True)),
        ([1, 2, 3], (1, 7), 12, Verdict((1, 2), 1, ended=True)),
        ([1, 2, 3], (1, 2), 13, Verdict((1, 2, 3), 2, ended=True)),
        ([4], (), 11, Verdict((4,), 0, ended=True)),
    ],
)
def test_what_is_kept_of_a_proposal(
    own: list[int], proposed: tuple[int, ...], max_length: int, expected: Verdict
) -> None:
    """The claim's span ends at position 10; the verifier's own tokens are those after each prefix of the proposal."""
    spec = SequenceSpec(GREEDY, seed=0, prompt_length=10, max_length=max_length, stop_token_ids=(STOP,))
    claim = Claim(Span(1, 0, tuple(range(20, 30)), spec), proposed)
    assert judge(own, claim, spec) == expected


PAIR = random_pair()
VOCAB = 256


def noise_alone(seed: int, position: int) -> int:
    """The token at this position of a request whose model finds all tokens equally likely."""
    first, second = row_keys(torch.tensor(seed), torch.tensor(position))
    return int(gumbel(first, second, torch.arange(VOCAB)).argmax())


@pytest.mark.parametrize(
    "new_kv",
    [
        lambda: FullKV(geometry(PAIR), 500, KERNELS["cpu_flash"]),
        # A text of 90 tokens has outgrown the window: slots tell nothing of positions.
        lambda: StreamingKV(geometry(PAIR), 3, WindowSettings(4, 40, 20), KERNELS["cpu_flash"]),
    ],
    ids=["full", "streaming"],
)
def test_a_token_is_drawn_with_the_noise_of_the_position_that_it_will_have(new_kv: Callable[[], KVCache]) -> None:
    """A pass may have one request or several, or a text that is stated from its middle on.

    If every tier used another position, tiers would agree, and no test of equality would notice. But a resumed request
    would go on differently.
    """
    runner = ModelRunner(PAIR.ours, new_kv())
    texts = {1: random_tokens(90, seed=1), 2: random_tokens(7, seed=2), 3: random_tokens(30, seed=3)}
    specs = {i: SequenceSpec(SamplingParams(), seed=100 + i, prompt_length=1, max_length=120) for i in texts}
    runner.forward([Forward(Span(1, 0, texts[1][:80], specs[1]), 0), Forward(Span(3, 0, texts[3], specs[3]), 1)])
    spans = [Span(1, 80, texts[1][80:]), Span(2, 0, texts[2], specs[2]), Span(3, 30, ())]
    sampled = {1: 4, 2: 1, 3: 2}
    logits, batch = runner.forward([Forward(span, sampled[span.sequence_id]) for span in spans])
    drawn = Drawer(runner, wait_for_grammars=True).draw(by_sequence(torch.zeros_like(logits), batch.rows))
    for i, text in texts.items():
        # The logits of the last token are those of the one after it, which stands at position len(text).
        positions = range(len(text) - sampled[i] + 1, len(text) + 1)
        assert drawn[i] == [noise_alone(specs[i].seed, position) for position in positions], i


def test_a_drafter_whose_parameters_exclude_every_token_proposes_none() -> None:
    """There are two sequences, and the other one gets drafts."""
    everything = SamplingParams(bad_word_ids=tuple((token,) for token in range(256)))
    proposer = ModelProposer(ModelRunner(PAIR.ours, FullKV(geometry(PAIR), 500, KERNELS["cpu_flash"])))
    specs = [SequenceSpec(params, 0, 3, 50) for params in (everything, GREEDY)]
    proposer.submit([Work(Span(i, 0, (1, 2, 3), spec), (4,)) for i, spec in enumerate(specs)])
    found = {proposal.sequence_id: len(proposal.tokens) for proposal in proposer.collect(0)}
    assert found == {0: 0, 1: 4}
