"""The standard health service, over a scripted pipeline."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from deploy import health
from deploy.errors import OverloadedError, UnknownServiceError
from deploy.grpc_errors import status_of
from deploy.health import Health
from tests.scripted import Scripted, served
from triforce_core.errors import UnavailableError

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


class Switched(Scripted):
    """Pipelines that can serve while `up`."""

    up = True

    async def check(self) -> None:
        if not self.up:
            raise UnavailableError("down")


def switched() -> tuple[Health, Switched]:
    _, service, _ = served()
    pipelines = Switched()
    service.pipelines, service.served = pipelines, True
    return Health(service), pipelines


@pytest.mark.parametrize("name", ["", "triforce.v1.Generation"])
def test_check_says_whether_a_request_would_be_served(name: str) -> None:
    found, pipelines = switched()
    request = HealthCheckRequest(service=name)
    assert asyncio.run(found.check(request)).status == SERVING
    pipelines.up = False
    assert asyncio.run(found.check(request)).status == NOT_SERVING
    pipelines.up, found.service.draining = True, True
    assert asyncio.run(found.check(request)).status == NOT_SERVING


def test_a_service_that_there_is_not_is_not_found() -> None:
    found, _ = switched()
    with pytest.raises(UnknownServiceError) as unknown:
        asyncio.run(found.check(HealthCheckRequest(service="other")))
    code, details = status_of(unknown.value)
    assert (code.name, details) == ("NOT_FOUND", "service: 'other' is not served here")


def test_the_list_has_every_service() -> None:
    found, pipelines = switched()
    pipelines.up = False
    statuses = asyncio.run(found.list()).statuses
    assert {name: each.status for name, each in statuses.items()} == dict.fromkeys(health.SERVICES, NOT_SERVING)


HOST = "10.0.0.1"


async def statuses(found: Health, name: str = "", host: str = HOST) -> list[int]:
    async with aclosing(found.watch(HealthCheckRequest(service=name), host)) as watch:
        return [response.status async for response in watch]


def test_a_watch_tells_changes_and_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PERIOD_S", 0.02)
    found, pipelines = switched()

    async def main() -> list[int]:
        watch = asyncio.ensure_future(statuses(found))
        for up in (True, False, True):
            pipelines.up = up
            await asyncio.sleep(0.2)
        found.service.draining = True
        return await watch

    assert asyncio.run(main()) == [SERVING, NOT_SERVING, SERVING, NOT_SERVING]
    assert not found.watches


def test_a_watch_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PERIOD_S", 0.02)
    monkeypatch.setattr(health, "MAX_WATCH_S", 0.1)
    found, _ = switched()
    assert asyncio.run(asyncio.wait_for(statuses(found), 10)) == [SERVING]
    assert not found.watches


def test_watches_are_limited_and_give_their_places_back() -> None:
    found, _ = switched()
    hosts = health.MAX_WATCHES // health.MAX_WATCHES_PER_HOST
    each_of = [f"10.0.0.{host}" for host in range(hosts) for _ in range(health.MAX_WATCHES_PER_HOST)]

    async def main() -> None:
        watches = [found.watch(HealthCheckRequest(), host) for host in each_of]
        for watch in watches:
            await anext(watch)
        with pytest.raises(OverloadedError, match="16 watches already"):
            await statuses(found, host="::1")
        await watches[0].aclose()
        another = found.watch(HealthCheckRequest(), "::1")
        assert (await anext(another)).status == SERVING
        for watch in (*watches, another):
            await watch.aclose()

    asyncio.run(main())
    assert not found.watches


def test_one_host_cannot_take_the_watches_of_others() -> None:
    found, _ = switched()

    async def main() -> None:
        watches = [found.watch(HealthCheckRequest(), "10.0.0.1") for _ in range(4)]
        for watch in watches:
            await anext(watch)
        with pytest.raises(OverloadedError, match="this host has 4 watches already"):
            await statuses(found, host="10.0.0.1")
        other = found.watch(HealthCheckRequest(), "10.0.0.2")
        assert (await anext(other)).status == SERVING
        for watch in (*watches, other):
            await watch.aclose()

    asyncio.run(main())


def test_a_watch_of_a_service_that_there_is_not_ends_at_once() -> None:
    found, _ = switched()
    watched = asyncio.run(asyncio.wait_for(statuses(found, "other"), 10))
    assert watched == [HealthCheckResponse.SERVICE_UNKNOWN]
    assert not found.watches
