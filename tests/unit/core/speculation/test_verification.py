"""Judging by equality, where a block ends, and which noise a token is drawn with."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from tests.random_models import random_pair, random_tokens
from tests.stating import geometry
from tests.trees import any_parents
from triforce_core.attention import KERNELS
from triforce_core.kv.base import Forward, KVCache
from triforce_core.kv.full import FullKV
from triforce_core.kv.streaming import StreamingKV, WindowSettings
from triforce_core.messages import GREEDY, Claim, SamplingParams, SequenceSpec, Span, Tree, Verdict, Work
from triforce_core.models.drawing import NO_TOKEN, Drawer, by_sequence
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


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([4, 0, 0, 0, 0, 0], Verdict((4,), 0)),  # no child of the span's end
        ([1, 2, 0, 0, 0, 0], Verdict((1, 2), 1)),  # a first child, whose child is another token
        ([2, 0, 7, 0, 0, 5], Verdict((2, 7, 5), 2)),  # the second child, and its second child
        ([2, 0, 6, 0, 8, 0], Verdict((2, 6, 8), 2)),
        ([2, 0, 6, 0, NO_TOKEN, 0], Verdict((2, 6), 2, no_token=True)),
        ([2, 0, STOP, 0, 0, 0], Verdict((2, STOP), 1, ended=True)),
    ],
)
def test_the_path_that_is_drawn_is_kept(own: list[int], expected: Verdict) -> None:
    """1 and 2 follow the span; 3 follows 1; 6 and 7 follow 2."""
    spec = SequenceSpec(GREEDY, seed=0, prompt_length=10, max_length=100, stop_token_ids=(STOP,))
    claim = Claim(Span(1, 0, tuple(range(20, 30)), spec), (1, 2, 3, 6, 7), parents=(-1, -1, 0, 1, 1))
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


EDITED = SamplingParams(
    repetition_penalty=1.4,
    frequency_penalty=0.5,
    presence_penalty=-0.5,
    bad_word_ids=((3,), (1, 2)),
    logit_bias=((4, 2.0),),
)


@pytest.mark.parametrize("sampling", [SamplingParams(), GREEDY, EDITED], ids=["sampled", "greedy", "edited"])
def test_what_follows_a_token_of_a_tree_is_drawn_as_if_its_path_were_the_text(sampling: SamplingParams) -> None:
    """With its noise and its edits, in any order of trees and texts."""
    rng, text = random.Random(4), random_tokens(60, seed=4, vocab=6)
    specs = {i: SequenceSpec(sampling, 7, 40, 200) for i in (1, 2)}

    def runner() -> ModelRunner:
        return ModelRunner(PAIR.ours, StreamingKV(geometry(PAIR), 3, WindowSettings(4, 200, 50), KERNELS["cpu_flash"]))

    ours, theirs = runner(), runner()
    drawer, plain = Drawer(ours, wait_for_grammars=True), Drawer(theirs, wait_for_grammars=True)
    for end in (50, 51, 53, 52, 60):
        count = rng.randrange(1, 9)
        tree = Tree(random_tokens(count, seed=end, vocab=6), any_parents(rng, count))
        forwards = [Forward(Span(i, 0, text[:end], spec), count + 1, tree=tree) for i, spec in specs.items()]
        logits, batch = ours.forward(forwards)
        random_logits = torch.randn(logits[: count + 1].shape, generator=torch.Generator().manual_seed(end))
        random_logits[:, 6:] -= 100  # what is drawn are tokens of the text, on which the edits depend
        of_rows = by_sequence(torch.cat([random_logits, random_logits]), batch.rows)
        found, ranked = drawer.draw(of_rows), drawer.ranked(of_rows, 3)
        for node in range(-1, count):
            whole = (*text[:end], *tree.path(node))
            _, alone = theirs.forward([Forward(Span(1, 0, whole, specs[1]), 1)])
            row = by_sequence(random_logits[[node + 1]], alone.rows)
            [expected] = plain.draw(row)[1]
            assert found[1][node + 1] == found[2][node + 1] == expected
            assert ranked[1][node + 1] == ranked[2][node + 1] == plain.ranked(row, 3)[1][0]
            assert ranked[1][node + 1][0] == (expected, 0.0)


def test_a_drafter_whose_parameters_exclude_every_token_proposes_none() -> None:
    """There are two sequences, and the other one gets drafts."""
    everything = SamplingParams(bad_word_ids=tuple((token,) for token in range(256)))
    proposer = ModelProposer(ModelRunner(PAIR.ours, FullKV(geometry(PAIR), 500, KERNELS["cpu_flash"])))
    specs = [SequenceSpec(params, 0, 3, 50) for params in (everything, GREEDY)]
    proposer.submit([Work(Span(i, 0, (1, 2, 3), spec), (4,)) for i, spec in enumerate(specs)])
    found = {proposal.sequence_id: len(proposal.tokens) for proposal in proposer.collect(0)}
    assert found == {0: 0, 1: 4}


def test_rankings_of_a_small_vocabulary_have_all_of_it() -> None:
    runner = ModelRunner(PAIR.ours, StreamingKV(geometry(PAIR), 1, WindowSettings(), KERNELS["cpu_flash"]))
    _, batch = runner.forward([Forward(Span(1, 0, (1, 2), SequenceSpec(GREEDY, 0, 1, 9)), 1)])
    of_rows = by_sequence(torch.tensor([[1.0, 5.0, -torch.inf, 3.5]]), batch.rows)
    assert Drawer(runner, wait_for_grammars=True).ranked(of_rows, 8) == {1: [[(1, 0.0), (3, 1.5), (0, 4.0)]]}
