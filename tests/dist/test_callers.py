"""Calls whose caller dies are cancelled; those of others go on."""

from __future__ import annotations

import asyncio

import pytest
import ray

from deploy import callers
from deploy.callers import Callers
from tests.starting import LocalRay


@ray.remote(num_cpus=0)
class Caller:
    def says_hello(self) -> str:
        return "hello"


def test_calls_of_the_dead_are_cancelled(local_ray: LocalRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "ASK_EVERY_S", 0.1)
    local_ray.start()
    mortal, other = Caller.remote(), Caller.remote()
    assert ray.get([each.says_hello.remote() for each in (mortal, other)]) == ["hello"] * 2

    async def check() -> None:
        served = Callers()
        ends = asyncio.Event()

        async def call(caller: object) -> str:
            with served.call_of(caller):
                await ends.wait()
            return "answered"

        calls = [asyncio.create_task(call(caller)) for caller in (mortal, mortal, other)]
        await asyncio.sleep(0.5)
        assert not any(each.done() for each in calls)
        ray.kill(mortal)
        await asyncio.wait(calls[:2], timeout=30)
        assert [each.cancelled() for each in calls] == [True, True, False]
        ends.set()
        assert await calls[2] == "answered"
        async with asyncio.timeout(30):
            while served.watching:  # nobody is asked for ever
                await asyncio.sleep(0.05)
        assert not served.calls

    asyncio.run(check())
    ray.kill(other)
