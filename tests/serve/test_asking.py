"""All replicas are asked together, and one that hangs takes no answer of the others with it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentBroadcastResponse

from deploy import replica as replica_module
from deploy.app import ONE_LOOP
from deploy.replica import RemotePipelines
from tests.starting import LocalRay
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import Settings
from triforce_core.errors import UnavailableError


class Replica:
    """Answers at once, as a replica that is well does. Its name is its process, its only tier the draft tier."""

    async def status(self) -> tuple[str, list[bytes]]:
        return str(os.getpid()), [pb.TierStatus(tier="draft").SerializeToString()]

    async def ping(self) -> None: ...


class Asking:
    """What the gateway does with its replicas, in a process such as the gateway's."""

    def __init__(self, replicas: Any) -> None:
        self.pipelines = RemotePipelines(replicas, Settings())

    async def status(self) -> dict[str, list[str]]:
        return {name: [tier.tier for tier in tiers] for name, tiers in (await self.pipelines.status()).items()}

    async def check(self) -> None:
        await self.pipelines.check()


@pytest.fixture
def asking(local_ray: LocalRay) -> Iterator[Any]:
    """A handle to `Asking`, with two replicas behind it."""
    local_ray.start()
    from ray import serve

    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0, "runtime_env": {"env_vars": ONE_LOOP}}}
    replicas: Any = serve.deployment(Replica, num_replicas=2, **options)
    gateway: Any = serve.deployment(Asking, **options)
    serve.start(proxy_location="Disabled")
    try:
        yield serve.run(gateway.bind(replicas.bind()), name="asking", route_prefix=None)
    finally:
        serve.shutdown()


@pytest.mark.ci
def test_a_replica_that_hangs_takes_no_answer_of_the_others_with_it(asking: Any) -> None:
    def status() -> dict[str, list[str]]:
        found: dict[str, list[str]] = asking.status.remote().result(timeout_s=30)
        return found

    hangs, well = status()
    os.kill(int(hangs), signal.SIGSTOP)
    try:
        assert status() == {well: ["draft"]}
        for _ in range(2):  # whichever of the two Serve chooses
            asking.check.remote().result(timeout_s=30)
    finally:
        os.kill(int(hangs), signal.SIGCONT)
    assert status() == {hangs: ["draft"], well: ["draft"]}


def asked(monkeypatch: pytest.MonkeyPatch, *replicas: Any) -> RemotePipelines:
    """A `RemotePipelines` over these replicas, of which None is one that hangs. Whichever replica Serve chooses for a
    ping hangs, too.
    """

    async def silent() -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(replica_module, "ASK_TIMEOUT_S", 0.5)
    pipelines = object.__new__(RemotePipelines)
    broadcast = SimpleNamespace(_replica_results=[SimpleNamespace(get_async=each or silent) for each in replicas])
    ping = SimpleNamespace(remote=silent)
    pipelines.control = SimpleNamespace(ping=ping, broadcast=lambda question: broadcast)  # type: ignore[assignment]
    return pipelines


async def well() -> None:
    """A replica that is well: a ping has no result."""


async def gone() -> None:
    raise RayServeException("the replica is gone")


def test_a_replica_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    asyncio.run(asked(monkeypatch, None, gone, well).check())
    assert time.monotonic() - began < 0.9, "and not until the silent one has had its time again"
    with pytest.raises(UnavailableError, match="no replica can serve"):
        asyncio.run(asked(monkeypatch, None, gone).check())


def test_all_answers_are_those_of_the_replicas_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(asked(monkeypatch, None, gone, well, well)._ask_all("ping")) == [None, None]


def test_a_private_method_of_ray_that_is_missing_is_no_silent_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DeploymentBroadcastResponse, "_fetch_replica_results_async")
    with pytest.raises(AttributeError, match="_fetch_replica_results_async"):
        asyncio.run(asked(monkeypatch, well)._ask_all("status"))
