"""A target that dies or hangs is replaced in place: the drafting tiers stay, and resumed requests end the same."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from actors import supervisor as supervision
from actors.pipeline import Pipeline
from actors.supervisor import Supervisor
from actors.wire import sampling_to_proto
from tests.conftest import HeldOut
from tests.dist.conftest import StartPipeline
from tests.dist.decoding import Tiers
from tests.dist.test_faults import pid_of
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import load_settings
from triforce_core.errors import DeadlineError, UnavailableError
from triforce_core.messages import SamplingParams, Tier

NUM_TOKENS = 160
SETTINGS = load_settings(dtype="bfloat16", max_sequences=4, retrieval={"budget": 256, "refresh_every": 24})


class Cut(Exception):
    """A stream broke off."""

    def __init__(self, tokens: list[int], error: UnavailableError) -> None:
        super().__init__(str(error))
        self.tokens, self.error = tokens, error


class Supervised(Tiers):
    """A pipeline with a supervisor, which works while the loop runs."""

    def __init__(self, pipeline: Pipeline, runner: asyncio.Runner) -> None:
        super().__init__(pipeline, runner.run)
        self.pids = {tier: pid_of(pipeline, tier) for tier in Tier}

    @property
    def target_pid(self) -> int:
        assert self.pipeline.target is not None
        return self.pipeline.target.pid

    async def stream(
        self, request: pb.DecodeRequest, fault: Callable[[], None] | None = None, after: int = 10
    ) -> list[int]:
        """Return the tokens. The fault happens once there are `after` of them; then `Cut` is raised."""
        tokens: list[int] = []
        try:
            async for event in self.pipeline.decode(request):
                tokens += event.token_ids
                if fault is not None and len(tokens) >= after:
                    fault()
                    fault = None
        except UnavailableError as error:
            raise Cut(tokens, error) from error
        return tokens

    async def survived(self, request: pb.DecodeRequest, fault: Callable[[], None]) -> tuple[list[int], float]:
        """Send a request, let the fault happen in its midst, and resume it as often as needed. Return all its tokens,
        and the longest time without a token.
        """
        tokens: list[int] = []
        gap = 0.0
        while True:
            began = time.monotonic()
            again = pb.DecodeRequest.FromString(request.SerializeToString())
            again.resume_token_ids.extend(tokens)
            try:
                tokens += await self.stream(again, None if tokens else fault)
            except Cut as cut:
                tokens += cut.tokens
                began = time.monotonic()
                await asyncio.sleep(0.1)
                continue
            finally:
                gap = max(gap, time.monotonic() - began)
            return tokens, gap

    def kill(self, with_signal: signal.Signals) -> None:
        os.kill(self.target_pid, with_signal)


@contextmanager
def supervised(start_pipeline: StartPipeline) -> Iterator[Supervised]:
    with start_pipeline(SETTINGS) as (runner, pipeline):

        async def supervise() -> asyncio.Task[None]:
            return asyncio.create_task(Supervisor(pipeline, SETTINGS).run())

        task = runner.run(supervise())
        yield Supervised(pipeline, runner)
        task.cancel()


def asked(prompt: tuple[int, ...], temperature: float, **fields: float) -> pb.DecodeRequest:
    return pb.DecodeRequest(
        prompt_token_ids=prompt,
        sampling=sampling_to_proto(SamplingParams(temperature)),
        seed=3,
        max_tokens=NUM_TOKENS,
        lookaheads=gen.Lookaheads(values=[8, 3]),
        **fields,
    )


@pytest.mark.ci
def test_a_killed_and_a_stopped_target_come_back_under_the_same_drafting_tiers(
    start_pipeline: StartPipeline, held_out: HeldOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "ANSWER_S", 2.0)  # of the stopped one
    prompt = held_out("inspect.py", 600)
    with supervised(start_pipeline) as tiers:
        expected = {temperature: tiers.run(tiers.stream(asked(prompt, temperature))) for temperature in (0.0, 0.8)}
        assert expected[0.0] != expected[0.8]
        for number, (fault, temperature) in enumerate(((signal.SIGKILL, 0.8), (signal.SIGSTOP, 0.0)), start=1):
            before = tiers.target_pid

            async def both(fault: signal.Signals = fault, temperature: float = temperature) -> None:
                """One request is in flight when the fault happens. Another comes meanwhile and waits."""
                began = time.monotonic()
                survivor = asyncio.create_task(tiers.survived(asked(prompt, temperature), lambda: tiers.kill(fault)))
                while tiers.pipeline.serving.is_set():
                    await asyncio.sleep(0.01)
                print(f"{fault.name}: seen {time.monotonic() - began:.1f} s after the request")
                with pytest.raises(DeadlineError, match=r"not done within 0\.2 s"):
                    await tiers.stream(asked(prompt, temperature, timeout_s=0.2))
                assert await tiers.stream(asked(prompt, temperature, timeout_s=120)) == expected[temperature]
                tokens, gap = await survivor
                assert tokens == expected[temperature]
                print(f"{fault.name}: {gap:.1f} s until the resumed request had ended")

            tiers.run(both())
            assert tiers.target_pid != before
            assert not os.path.exists(f"/proc/{before}/exe"), "nothing is left of the old one"
            now = {tier: pid_of(tiers.pipeline, tier) for tier in Tier}
            assert now == tiers.pids | {Tier.TARGET: tiers.target_pid}, "the drafting tiers are the same"
            assert tiers.status()["target"].restarts == number
        tiers.wait_idle()
        assert tiers.status()["target"].kv_tokens == 0
        assert tiers.decode(asked(prompt, 0.8))[0].tokens == expected[0.8]
        origins = tiers.decode(asked(prompt, 0.8))[0].origins
        assert set(origins) == {Tier.DRAFT, Tier.RETRIEVAL, Tier.TARGET}, "the tiers below draft for the new target"
