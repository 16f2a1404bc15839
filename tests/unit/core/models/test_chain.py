"""Drafts that are drawn without the host between their steps are those that are drawn step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.random_models import random_pair, random_tokens
from tests.stating import geometry
from tests.unit.core.models.test_draw_operators import logits_of, samplings
from triforce_core.attention import KERNELS
from triforce_core.config import load_settings
from triforce_core.kv.streaming import StreamingKV, WindowSettings
from triforce_core.messages import GREEDY, Proposal, SamplingParams, SequenceSpec, Span, Work
from triforce_core.models import graphs
from triforce_core.models.chain import RANKS, Chain, best, limits_of
from triforce_core.models.graphs import shaped_passes
from triforce_core.models.runner import ModelRunner
from triforce_core.sampling.draw import Draw, keys_of, perturbed_logits
from triforce_core.speculation.drafting import ModelProposer

PAIR = random_pair()
MODEL = PAIR.ours
SAMPLED = SamplingParams(1.0)


@given(st.lists(samplings, min_size=1, max_size=4), st.sampled_from([2, 33, 400]), st.integers(0, 10**6))
def test_what_is_found_are_the_first_of_all(params: list[SamplingParams], vocab: int, seed: int) -> None:
    params = [replace(each, top_p=1.0) if each.top_k else each for each in params]
    draws = [Draw(each, seed, 7) for each in params]
    logits = logits_of(len(draws), vocab, seed, 1e-6).nan_to_num(neginf=-50.0)  # without edits nothing is excluded
    keys = keys_of(draws, [*range(len(draws))], logits.device)
    values, tokens = best(logits, keys, torch.tensor([limits_of(each) for each in params]))
    assert tokens.shape == (len(draws), min(RANKS, vocab))
    assert values[:, 0].isfinite().all(), "the most probable token is never excluded"
    truncated = [bool(each.top_k or each.top_p < 1) for each in params]
    of_rows = zip(logits, perturbed_logits(logits, draws), values, tokens, truncated, strict=True)
    for row, expected, found, its, truncates in of_rows:
        allowed = int(found.isfinite().sum())
        order = expected.sort(descending=True, stable=True)
        # The most probable token may come last though others would come before it, which were not looked at.
        added = truncates and bool(found[allowed - 1] != order.values[allowed - 1])
        assert not added or its[allowed - 1] == row.argmax()
        assert found[: allowed - added].tolist() == order.values[: allowed - added].tolist()
        assert its.unique().numel() >= allowed
        assert expected[its[:allowed]].tolist() == found[:allowed].tolist()
        if expected.isfinite().all():
            assert allowed == len(found)


def proposer(ahead: int, sequences: int = 4) -> ModelProposer:
    """With passes of constant shape, and chains of up to so many steps."""
    kv = StreamingKV(geometry(PAIR), sequences, WindowSettings(4, 20, 12), KERNELS["cpu_flash"])
    settings = load_settings(dtype="float32", max_sequences=sequences, graphs="eager")
    shaped = shaped_passes(MODEL, kv, settings, 4, ahead=ahead)
    return ModelProposer(ModelRunner(MODEL, kv, shaped=shaped))


class Replayed:
    """In place of a CUDA graph: it was run to warm up and to be captured, and computes where a graph would."""

    def __init__(self, run: Callable[[], object], *of: object) -> None:
        warm_up = of[-1] if callable(of[-1]) else run
        for each in [warm_up] * graphs.WARM_UPS:
            each()
        self.replay = run


@pytest.mark.parametrize("ahead", [2, 3, 5])
def test_captured_chains_draft_the_same(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-ups must stay within the room of a block, which on a GPU is the host's last chance to hear of it."""
    monkeypatch.setattr(graphs, "graph_of", Replayed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    whole = graphs.build_passes
    monkeypatch.setattr(graphs, "build_passes", lambda *of, **given: whole(*of, **given | {"capture": True}))
    captured, plain = proposer(ahead), proposer(0)
    assert captured.runner.shaped is not None
    assert all(set(chain.graphs) == {True, False} for chain in captured.runner.shaped.chains)
    for sampling in (GREEDY, SAMPLED):
        found, expected = (run(by, sampling, 3) for by in (captured, plain))
        assert [[each.tokens for each in some] for some in found] == [
            [each.tokens for each in some] for some in expected
        ]
        for by in (captured, plain):
            by.release([0, 1, 2])


def run(by: ModelProposer, sampling: SamplingParams, number: int, **asked: float) -> list[list[Proposal]]:
    """Draft for texts that go on partly as drafted, over several windows."""
    texts = {i: random_tokens(30 + 7 * i, seed=i) for i in range(number)}
    told = dict.fromkeys(texts, 0)
    specs = {i: SequenceSpec(sampling, i, len(texts[i]), 90 + 10 * i, stop_token_ids=(3,)) for i in texts}
    rounds = list[list[Proposal]]()
    for turn in range(24):
        for i, text in texts.items():
            span = Span(i, told[i], text[told[i] :], None if told[i] else specs[i])
            by.submit([Work(span, (1 + (turn + i) % 6,), **asked)])
            told[i] = len(text)
        rounds.append(by.collect(0))
        for proposal in rounds[-1]:
            i = proposal.sequence_id
            taken = proposal.tokens[: (turn + i) % 5] + random_tokens(1, seed=100 * turn + i)
            texts[i] = (texts[i] + taken)[: specs[i].max_length - 1]
    return rounds


@pytest.mark.parametrize(
    "sampling", [GREEDY, SAMPLED, SamplingParams(0.7, top_p=0.9), SamplingParams(1.3, top_k=40, min_p=0.02)], ids=str
)
@pytest.mark.parametrize("number", [1, 3])
def test_the_drafts_are_the_same(sampling: SamplingParams, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, run_chain = list[int](), Chain.run

    def seen(chain: Chain, kv: StreamingKV, logits: torch.Tensor, wanted: dict[int, int]) -> object:
        drawn.append(max(wanted.values()))
        return run_chain(chain, kv, logits, wanted)

    monkeypatch.setattr(Chain, "run", seen)
    together, one_by_one = (run(proposer(ahead), sampling, number) for ahead in (5, 0))
    for ours, theirs in zip(together, one_by_one, strict=True):
        for each, other in zip(ours, theirs, strict=True):
            assert each.tokens == other.tokens
            assert each.missing_from is other.missing_from is None
            assert each.tallies[0].passes >= other.tallies[0].passes, "those after a stop token are known too late"
    assert max(drawn) == 5, "six tokens are drafted in two parts"
    assert len(drawn) > 20


def test_a_draft_ends_where_it_is_worth_no_more() -> None:
    """The passes after that are not lost: the device has run them before the host has seen the first token."""
    together, one_by_one = (run(proposer(ahead), SAMPLED, 2, least_gain=0.3) for ahead in (6, 0))
    tokens = [[[each.tokens for each in some] for some in rounds] for rounds in (together, one_by_one)]
    assert tokens[0] == tokens[1]
    assert len({len(each) for some in tokens[0] for each in some}) > 2


@pytest.mark.parametrize("given", [{"frequency_penalty": 0.5}, {"logit_bias": ((5, 3.0),)}], ids=str)
def test_what_depends_on_the_text_is_drawn_by_the_host(given: dict[str, float]) -> None:
    sampling = SamplingParams(1.0, **given)
    together, one_by_one = (run(proposer(ahead), sampling, 2) for ahead in (6, 0))
    assert [[each.tokens for each in some] for some in together] == [
        [each.tokens for each in some] for some in one_by_one
    ]
