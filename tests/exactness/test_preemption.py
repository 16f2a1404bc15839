"""A full pool delays requests and changes no token: preempted ones go on as if nothing had happened."""

from __future__ import annotations

import pytest

from tests.exactness.cases import Case, models
from tests.integrity import check
from tests.random_models import random_tokens
from triforce_core.building.assembly import local_engine
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Output, Request
from triforce_core.kv.full import FullKV
from triforce_core.messages import SamplingParams

Tokens = tuple[int, ...]
CASE = Case(0.8, 1.0, (4, 2), 128, 8, 5, 0.05, 0.1, (16, 200), 60)
REQUESTS, PROMPT, MOST = 6, 150, 500


def requests(lookaheads: tuple[int, int], **fields: int) -> list[Request]:
    return [
        Request(
            random_tokens(PROMPT + 20 * n, seed=n),
            MOST - 40 * n,
            SamplingParams(0.8, repetition_penalty=1.1 if n % 2 else 1.0),
            seed=n,
            lookaheads=(0, 0) if n == 3 else lookaheads,
            **fields,
        )
        for n in range(REQUESTS)
    ]


def engine(pool_tokens: int, max_sequences: int) -> Engine:
    settings = CASE.settings
    target = settings.target.model_copy(update={"kv_pool_tokens": pool_tokens, "prefill_chunk": 64})
    of_target, of_retrieval, drafter = models(CASE)
    settings = settings.model_copy(update={"target": target, "max_sequences": max_sequences})
    return local_engine(of_target, drafter, settings, of_retrieval)


def run(it: Engine, asked: list[Request]) -> tuple[list[list[Output]], int]:
    """The outputs of each request, and the most requests that lived at once."""
    outputs: dict[int, list[Output]] = {it.submit(request): [] for request in asked}
    most = 0
    while not it.idle:
        for output in it.run_once():
            outputs[output.sequence_id].append(output)
        most = max(most, len(it.scheduler.live))
    return list(outputs.values()), most


def tokens_of(outputs: list[Output]) -> Tokens:
    return tuple(token for output in outputs for token in output.tokens)


@pytest.mark.parametrize("lookaheads", [pytest.param((4, 2), marks=pytest.mark.ci), (0, 0)], ids=str)
def test_a_pool_of_half_the_size_gives_the_same_tokens(lookaheads: tuple[int, int]) -> None:
    asked = requests(lookaheads)
    alone = engine(8192, 1)
    expected = [tokens_of(run(alone, [request])[0][0]) for request in asked]
    needed = sum(len(request.prompt) + request.max_tokens for request in asked)
    it = engine(needed // 2, REQUESTS)
    found, most = run(it, asked)
    assert [tokens_of(outputs) for outputs in found] == expected
    assert most > 3, "more than fit at their greatest lengths"
    preempted = [outputs[-1].stats.preempted for outputs in found]
    assert sum(preempted) >= 1
    assert max(preempted) == 1
    for outputs in found:
        stats = outputs[-1].stats
        # A request that is preempted while it is decoded is prefilled again. The token that the last chunk of a prefill
        # gives belongs to no round.
        assert stats.decoded == len(tokens_of(outputs)) - 1 - stats.preempted
        assert stats.decoded == stats.tallies[0].rounds or any(lookaheads), "one a round without drafts"
        assert stats.queued_s >= 0
    kv = it.scheduler.kv
    assert isinstance(kv, FullKV)
    assert not kv.held
    assert kv.used_tokens == 0
    check(kv)


@pytest.mark.ci
def test_prompt_logprobs_of_a_preempted_request_come_once() -> None:
    """The request is preempted while its prompt is read, and again while it is decoded."""
    [first, second, *_] = requests((4, 2), prompt_logprobs=2, logprobs=1)
    it = engine(8192, 2)
    expected, _ = run(it, [first, second])
    ids = [it.submit(first), it.submit(second)]
    outputs: dict[int, list[Output]] = {i: [] for i in ids}
    turns = 0
    while not it.idle:
        turns += 1
        if turns in (2, 30):  # as if the pool were full
            young = next(s for s in it.scheduler.live.values() if s.request_id == ids[1])
            it._drop(young)
            it.scheduler.add(young.again(next(it.ids)))
        for output in it.run_once():
            outputs[output.sequence_id].append(output)
    for before, after in zip(expected, outputs.values(), strict=True):
        scores = [score for output in after for score in output.prompt_logprobs]
        assert len(scores) == PROMPT + (20 if after[-1].sequence_id == ids[1] else 0)
        theirs = [score for output in before for score in output.prompt_logprobs]
        assert [score.logprob for score in scores] == pytest.approx([s.logprob for s in theirs], abs=1e-4, nan_ok=True)
        assert tokens_of(after) == tokens_of(before)
        assert sum(len(output.logprobs) for output in after) == len(tokens_of(after))
    assert outputs[ids[1]][-1].stats.preempted == 2
