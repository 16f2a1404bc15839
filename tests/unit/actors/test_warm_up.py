"""The warm-up, over a pipeline that answers at once and notes what it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from actors import warm_up as module
from actors.warm_up import LONG_PROMPT, PATIENCE_S, warm_up
from actors.wire import sampling_from_proto
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import Settings, load_settings
from triforce_core.engine.limits import Limits
from triforce_core.engine.sequence import Request
from triforce_core.messages import SamplingParams

SETTINGS = load_settings(dtype="float32", retrieval={"refresh_every": 10})
LIMITS = Limits(context_length=16384, kv_pool_tokens=32768, vocab_size=4096)


class Recorder:
    """A pipeline, and the handle of its target. A prompt of `n` tokens takes `seconds(n)`."""

    def __init__(self, limits: Limits, rate: float, first_s: float = 0.0) -> None:
        self.given, self.rate, self.first_s = limits, rate, first_s
        self.now, self.asked = 0.0, list[pb.DecodeRequest]()
        self.actors = self.target = self.limits = self

    async def remote(self) -> Limits:
        return self.given

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        self.now += len(request.prompt_token_ids) / self.rate + (0.0 if self.asked else self.first_s)
        self.asked.append(request)
        for _ in range(0, request.max_tokens, 9):
            yield pb.DecodeEvent(token_ids=[1] * 9)
            self.now += 0.1

    @property
    def prompts(self) -> list[int]:
        return [len(request.prompt_token_ids) for request in self.asked]


def warmed(
    monkeypatch: pytest.MonkeyPatch, limits: Limits = LIMITS, rate: float = 1e6, first_s: float = 0.0
) -> Recorder:
    pipeline = Recorder(limits, rate, first_s)
    monkeypatch.setattr(module.time, "monotonic", lambda: pipeline.now)
    asyncio.run(warm_up(pipeline, SETTINGS))  # type: ignore[arg-type]
    return pipeline


def test_the_warm_up_covers_a_short_prompt_a_chunk_and_a_long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = warmed(monkeypatch)
    assert pipeline.prompts == [64, 64, 2048, LONG_PROMPT, LONG_PROMPT]
    asked = pipeline.asked
    lookaheads = [tuple(each.lookaheads.values) for each in asked]
    assert lookaheads == [(8, 3), (0, 0), (0, 3), (0, 0), (8, 3)], "all tiers, the target alone, without the retrieval"
    assert asked[-1].max_tokens == 21, "two snapshots are cut"
    sampled = [sampling_from_proto(each.sampling).temperature > 0 for each in asked]
    assert sampled == [True, True, True, False, False], "both kinds of draws"
    firsts = [each.prompt_token_ids[0] for each in asked]
    assert len(set(firsts[:4])) == 4, "no KV of an earlier prompt is found"
    assert firsts[4] == firsts[3], "the long prompt is read once"


def test_a_slow_machine_s_prompts_are_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warmed(monkeypatch, rate=128).prompts == [64, 64, *[128 * PATIENCE_S] * 3]


def test_a_cold_first_pass_does_not_shorten_the_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warmed(monkeypatch, rate=4000, first_s=9.0).prompts[2:] == [2048, LONG_PROMPT, LONG_PROMPT]


@pytest.mark.parametrize("context", [2, 9, 300])
def test_small_contexts_are_warmed_up_within_them(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(context, 2 * context, 50)
    for each in warmed(monkeypatch, limits).asked:
        limits.check(Request(tuple(each.prompt_token_ids), each.max_tokens, SamplingParams(), 0, (0, 0)))


def test_a_warm_up_that_does_not_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Hangs(Recorder):
        async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
            await asyncio.sleep(3600)
            yield pb.DecodeEvent()

    monkeypatch.setattr(module, "WARM_UP_S", 0.2)
    settings: Settings = SETTINGS
    pipeline: Any = Hangs(LIMITS, 1.0)
    asyncio.run(warm_up(pipeline, settings))
    assert "not warm after" in caplog.text
