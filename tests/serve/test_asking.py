"""All replicas are asked together, and one that hangs takes no answer of the others with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.app import ONE_LOOP
from deploy.replica import RemotePipelines
from tests.starting import LocalRay
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import Settings


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
