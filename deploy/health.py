"""The standard health service, grpc.health.v1, for probes and load balancers."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListResponse

from deploy.errors import OverloadedError, UnknownServiceError
from deploy.service import Service
from triforce_core.errors import TriForceError

SERVICES = ("", "triforce.v1.Generation", "grpc.health.v1.Health")  # the empty name means the server as a whole
PERIOD_S = 2.0  # between two looks of a watch
MAX_WATCHES = 16  # each is one of the calls that the gateway takes at once
MAX_WATCHES_PER_HOST = 4  # a watch needs no key: without this limit one host could take them all
MAX_WATCH_S = 300.0  # then the watch ends; clients that still want one begin another


class Health:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.watches = Counter[str]()  # by the client's host

    async def check(self, request: HealthCheckRequest) -> HealthCheckResponse:
        """Whether a request would be served. Raises `UnknownServiceError`."""
        response = await self.status(request.service)
        if response.status == HealthCheckResponse.SERVICE_UNKNOWN:
            raise UnknownServiceError("service", request.service, "is not served here")
        return response

    async def list(self) -> HealthListResponse:
        """The status of every service, which is the same for all."""
        status = await self.status("")
        return HealthListResponse(statuses=dict.fromkeys(SERVICES, status))

    async def watch(self, request: HealthCheckRequest, host: str) -> AsyncGenerator[HealthCheckResponse, None]:
        """The status now, and again whenever it has changed, until the server shuts down or `MAX_WATCH_S` have passed.
        `host` is the client's address. Raises `OverloadedError`.
        """
        if request.service not in SERVICES:
            yield await self.status(request.service)  # it never changes
            return
        if self.watches[host] >= MAX_WATCHES_PER_HOST:
            raise OverloadedError(f"this host has {MAX_WATCHES_PER_HOST} watches already; use Check")
        if self.watches.total() >= MAX_WATCHES:
            raise OverloadedError(f"there are {MAX_WATCHES} watches already; use Check")
        self.watches[host] += 1
        try:
            told, until = None, time.monotonic() + MAX_WATCH_S
            while True:
                response = await self.status(request.service)
                if response != told:
                    yield response
                    told = response
                if self.service.draining or time.monotonic() >= until:
                    return
                await asyncio.sleep(PERIOD_S)
        finally:
            self.watches[host] -= 1
            if not self.watches[host]:
                del self.watches[host]

    async def status(self, name: str) -> HealthCheckResponse:
        if name not in SERVICES:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        try:
            await self.service.check()
        except TriForceError:
            return HealthCheckResponse(status=HealthCheckResponse.NOT_SERVING)
        return HealthCheckResponse(status=HealthCheckResponse.SERVING)
