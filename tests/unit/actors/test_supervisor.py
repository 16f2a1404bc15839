"""When a target is taken for dead, how often it is started anew, and what requests do meanwhile."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from actors import supervisor as supervision
from actors.pipeline import Pipeline
from actors.supervisor import Supervisor
from deploy.errors import ReplicaError
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import load_settings
from triforce_core.errors import DeadlineError, UnavailableError

TOKEN = pb.DecodeEvent(token_ids=[1]).SerializeToString()


class Process:
    """A process that only pretends."""

    def __init__(self) -> None:
        self.process, self.dead, self.killed = self, False, 0

    def kill(self) -> None:
        self.dead = True
        self.killed += 1


class Target:
    """A target that answers questions as it is told to; the last answer is repeated."""

    def __init__(self, pid: int, *answers: bool | None) -> None:
        """Each of the `answers` says whether the target is ready. With None the target leaves the question
        unanswered.
        """
        self.pid, self.answers, self.process, self.asked = pid, list(answers or (True,)), Process(), 0
        self.may_yield = asyncio.Event()
        self.decoding = 0

    async def status(self, timeout_s: float) -> pb.TierStatus:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None or self.process.dead:
            raise UnavailableError("no answer")
        return pb.TierStatus(ready=answer)

    async def decode(self, request: bytes) -> AsyncGenerator[bytes, None]:
        self.decoding += 1
        await self.may_yield.wait()
        if self.process.dead:
            raise UnavailableError("it died", suspect=False)
        yield TOKEN
        await asyncio.sleep(60)

    async def close(self) -> None:
        """There is no connection."""


class Supervised(Supervisor):
    """A supervisor whose targets start as they are told to."""

    def __init__(self, pipeline: Pipeline, *starts: Callable[[], Coroutine[Any, Any, Target]]) -> None:
        super().__init__(pipeline, load_settings())
        self.starts, self.pids = list(starts), 1

    async def _new_process(self, old: int) -> int:
        assert old == self.pids
        self.pids += 1
        return self.pids

    async def _start(self, pid: int) -> None:
        self.pipeline.target = await self.starts.pop(0)()  # type: ignore[assignment]


async def good() -> Target:  # a start takes time elsewhere
    return Target(0)


async def bad() -> Target:
    raise UnavailableError("it died while it was loaded")


async def hanging() -> Target:
    await asyncio.sleep(60)
    raise AssertionError


async def broken() -> Target:
    raise KeyError("an error that nobody expects of a start")


def served(*answers: bool | None) -> tuple[Pipeline, Target]:
    pipeline, target = Pipeline(SimpleNamespace(each=list, followers=())), Target(1, *answers)  # type: ignore[arg-type]
    pipeline.target = target  # type: ignore[assignment]
    pipeline.serving.set()
    return pipeline, target


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(supervision, "RETRY_S", 0.01)
    monkeypatch.setattr(supervision, "LOAD_S", 1.0)
    monkeypatch.setattr(supervision, "ANSWER_S", 0.05)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def first_token(pipeline: Pipeline, **fields: float) -> None:
    async for _ in pipeline.decode(pb.DecodeRequest(**fields)):
        return


async def supervised_until(pipeline: Pipeline, condition: Callable[[], bool]) -> None:
    """A supervisor, whose next start is good, is at work until the condition holds."""
    supervising = asyncio.create_task(Supervised(pipeline, good).run())
    await until(condition)
    supervising.cancel()


def test_a_supervisor_that_fails_stops_the_pipeline() -> None:
    """Then the replica reports ill health, and Serve replaces it."""

    async def run() -> None:
        pipeline, target = served()
        target.process.dead = True
        await asyncio.wait_for(Supervised(pipeline, broken).run(), 10)
        assert pipeline.stopped == "the target is not watched any more", "the text of the error is not for clients"
        with pytest.raises(UnavailableError, match="not watched any more"):
            await first_token(pipeline)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answers", "answer_s"),
    [
        ((True, None, True, None, True), 0.05),  # late answers, but no two in a row
        ((True, False, True, False, True), 0.05),  # not ready, but no two in a row
        ((*[None] * 20, True), 30.0),  # a broken connection refuses at once, again and again, until it is made anew
    ],
    ids=["late", "not ready", "no connection"],
)
def test_a_live_target_is_not_killed(
    answers: tuple[bool | None, ...], answer_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "ANSWER_S", answer_s)

    async def run() -> None:
        pipeline, target = served(*answers)
        await supervised_until(pipeline, lambda: target.asked > len(answers) + 3)
        assert not target.process.killed

    asyncio.run(run())


@pytest.mark.parametrize("answer", [None, False], ids=["hangs", "is not ready"])
def test_a_target_that_is_not_well_twice_in_a_row_is_killed_and_replaced(answer: bool | None) -> None:
    async def run() -> None:
        pipeline, target = served(True, answer)
        await supervised_until(pipeline, lambda: pipeline.restarts == 1)
        assert target.process.killed == 1

    asyncio.run(run())


def test_a_target_that_does_not_come_up_is_tried_three_times() -> None:
    async def run() -> None:
        pipeline, target = served()
        supervisor = Supervised(pipeline, bad, hanging, good, bad, bad, bad)
        supervising = asyncio.create_task(supervisor.run())
        target.process.dead = True
        await until(lambda: pipeline.restarts == 1)
        assert not pipeline.stopped, "the third start was good, and the count begins anew"
        assert pipeline.target is not None
        pipeline.target.process.dead = True  # type: ignore[misc]
        supervisor.pids = 0
        pipeline.serving.clear()
        waiting = asyncio.create_task(first_token(pipeline))
        await asyncio.wait_for(supervising, 10)
        assert not supervisor.starts
        with pytest.raises(UnavailableError, match=r"does not come up.*3 of 3.*it died while it was loaded"):
            await waiting
        with pytest.raises(UnavailableError, match="does not come up"):
            await pipeline.check(1.0)

    asyncio.run(run())


def test_requests_wait_for_the_new_target_within_their_deadlines() -> None:
    async def run() -> None:
        pipeline, target = served()
        loaded, new = asyncio.Event(), Target(2)
        new.may_yield.set()

        async def loading() -> Target:
            await loaded.wait()
            return new

        supervised = Supervised(pipeline, loading)
        supervised.load_limit_s = 60.0
        supervisor = asyncio.create_task(supervised.run())
        in_flight = asyncio.create_task(first_token(pipeline))
        await until(lambda: target.decoding == 1)
        target.process.dead = True
        target.may_yield.set()
        with pytest.raises(UnavailableError) as failed:
            await in_flight
        assert not failed.value.suspect
        sent = ReplicaError(str(failed.value), "a", suspect=failed.value.suspect)
        assert not pickle.loads(pickle.dumps(sent)).suspect, "Ray carries it"
        with pytest.raises(UnavailableError, match="being replaced"):
            await pipeline.check(1.0)
        with pytest.raises(DeadlineError, match=r"not done within 0\.05 s"):
            await first_token(pipeline, timeout_s=0.05)
        pipeline.patient = False
        with pytest.raises(UnavailableError, match="being replaced"):
            await first_token(pipeline)
        pipeline.patient = True
        waiting = asyncio.create_task(first_token(pipeline, timeout_s=60))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        loaded.set()
        await asyncio.wait_for(waiting, 10)
        supervisor.cancel()

    asyncio.run(run())
