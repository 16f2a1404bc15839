"""Logprobs are those of one ordinary pass of transformers over the same tokens, whatever was speculated."""

from __future__ import annotations

import pytest

from tests.exactness.test_parameters import outputs_of
from tests.random_models import plain_logits, random_pair, random_tokens, with_noise
from triforce_core.building.assembly import local_engine
from triforce_core.config import Settings
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Output, Request
from triforce_core.messages import GREEDY, SamplingParams, TokenLogprobs

PAIR, TOP = random_pair(), 3
RETRIEVAL, DRAFTER = with_noise(PAIR.ours, 0.05), with_noise(PAIR.ours, 0.1)
PROMPT = random_tokens(300, seed=1)
STRANGE = SamplingParams(0.8, top_p=0.7, repetition_penalty=1.5, logit_bias=((7, 20.0),), bad_word_ids=((3,),))


def engine() -> Engine:
    settings = Settings.model_validate(
        {
            "dtype": "float32",
            "max_sequences": 4,
            "target": {"prefill_chunk": 100, "kv_pool_tokens": 3000},
            "retrieval": {"budget": 64, "chunk": 8},
        }
    )
    return local_engine(PAIR.ours, DRAFTER, settings, RETRIEVAL)


def check(found: list[TokenLogprobs], text: tuple[int, ...], first: int) -> None:
    """Check that `found` are the logprobs of the tokens of `text` from `first` on."""
    expected = plain_logits(PAIR.theirs, text).log_softmax(-1)
    assert len(found) == len(text) - first
    for position, each in enumerate(found, start=first):
        if position == 0:
            assert each == TokenLogprobs(None)
            continue
        row = expected[position - 1]
        assert each.logprob == pytest.approx(float(row[text[position]]), abs=1e-4)
        values, ids = row.topk(TOP)
        assert [token for token, _ in each.top] == ids.tolist()
        assert [logprob for _, logprob in each.top] == pytest.approx(values.tolist(), abs=1e-4)


def whole(outputs: list[Output]) -> tuple[tuple[int, ...], list[TokenLogprobs], list[TokenLogprobs]]:
    return (
        tuple(token for output in outputs for token in output.tokens),
        [each for output in outputs for each in output.logprobs],
        [each for output in outputs for each in output.prompt_logprobs],
    )


@pytest.mark.parametrize("lookaheads", [(6, 2), (0, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, STRANGE], ids=["greedy", "strange"])
def test_logprobs_are_those_of_one_pass(sampling: SamplingParams, lookaheads: tuple[int, int]) -> None:
    """Logprobs are taken before any parameter applies: the parameters of STRANGE change the tokens, and not their
    logprobs. A second request, beside the first, asks for no logprobs.
    """
    scored = Request(PROMPT, 60, sampling, 5, lookaheads, logprobs=TOP)
    plain = Request(PROMPT, 60, sampling, 5, lookaheads)
    first, second = outputs_of(engine(), [scored, plain])
    tokens, found, _ = whole(first)
    assert whole(second) == (tokens, [], [])
    check(found, PROMPT + tokens, len(PROMPT))


@pytest.mark.parametrize("length", [1, 2, 99, 100, 101, 300])
def test_prompt_logprobs_come_with_the_chunks(length: int) -> None:
    request = Request(PROMPT[:length], 20, GREEDY, 5, (6, 2), logprobs=TOP, prompt_logprobs=TOP)
    it, unscored = engine(), Request(PROMPT[:length], 20, GREEDY, 5, (6, 2))
    for _ in range(2):  # what a request reported is forgotten with it
        scored, plain = outputs_of(it, [request, unscored])
        tokens, found, of_prompt = whole(scored)
        assert whole(plain)[0] == tokens
        check(of_prompt, PROMPT[:length], 0)
        check(found, PROMPT[:length] + tokens, length)


def test_a_resumed_request_has_the_logprobs_of_the_rest() -> None:
    request = Request(PROMPT, 40, GREEDY, 5, (6, 2), logprobs=TOP, prompt_logprobs=TOP)
    tokens, _, _ = whole(outputs_of(engine(), [request])[0])
    resumed = Request(PROMPT, 40, GREEDY, 5, (6, 2), resume=tokens[:17], logprobs=TOP, prompt_logprobs=TOP)
    rest, of_rest, again = whole(outputs_of(engine(), [resumed])[0])
    assert (tokens[:17] + rest, len(of_rest)) == (tokens, 23)
    check(of_rest, PROMPT + tokens, len(PROMPT) + 17)
    check(again, PROMPT, 0)


def test_logits_of_a_whole_prompt_are_never_held() -> None:
    """A row of logits is as long as the vocabulary. Where the vocabulary is large, a pass therefore scores few tokens
    of prompts.
    """
    it = engine()
    it.scheduler.scored_chunk = 32
    rows: list[int] = []
    runner = it.decoder.verifier.runner  # type: ignore[attr-defined]
    forward = runner.forward

    def counted(forwards: list[object]) -> object:
        logits, batch = forward(forwards)
        rows.append(len(logits))
        return logits, batch

    runner.forward = counted
    for outputs in outputs_of(it, 2 * [Request(PROMPT, 4, GREEDY, 5, (0, 0), prompt_logprobs=TOP)]):
        check(whole(outputs)[2], PROMPT, 0)
    assert max(rows) <= 32 + 2, (
        "both prompts share the room of a pass; each needs the position before its chunk as well"
    )
    assert sum(rows) >= 2 * len(PROMPT)
