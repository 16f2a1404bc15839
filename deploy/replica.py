"""A replica owns one pipeline: its tier actors live in the replica's placement group, and die with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import ray.exceptions
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.util import get_current_placement_group

from actors.pipeline import Pipeline
from actors.warm_up import warm_up
from deploy.prefixes import prefix_keys
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import Settings
from triforce_core.errors import TriForceError, UnavailableError

log = logging.getLogger("ray.serve")

CHECK_TIMEOUT_S = 5.0
PING_TIMEOUT_S = 2.0
ASK_TIMEOUT_S = 4.0
MAX_FAILED_CHECKS = 3  # in a row; then Serve replaces the replica


class PipelineReplica:
    """Messages come and go as bytes: Ray cannot pickle protobuf's. Those of a request are passed on as they are."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        group = get_current_placement_group()
        assert group is not None, "deployed with a bundle for each of the pipeline's processes"
        self.failed_checks = 0
        self.pipeline = await Pipeline.start(settings, group)
        await warm_up(self.pipeline, settings)

    async def decode(self, request: bytes, prefix: bytes = b"") -> AsyncIterator[bytes]:
        """A DecodeRequest in, DecodeEvents out; a call that is cancelled stops its request.

        `prefix` is for the router on the way here.
        """
        async with aclosing(self.pipeline.relay(request)) as events:
            async for event in events:
                yield event

    async def status(self) -> tuple[str, list[bytes]]:
        """This replica's name, and a TierStatus of each tier, draft first."""
        name = serve.get_replica_context().replica_id.unique_id
        return name, [status.SerializeToString() for status in await self.pipeline.status()]

    async def check_health(self) -> None:
        """Serve replaces the replica, and with it the pipeline, when this has failed often enough.

        Serve lets what is in flight end first. What a hung target has in flight never would: it is ended here.
        """
        try:
            await self.pipeline.check(CHECK_TIMEOUT_S)
            self.failed_checks = 0
        except UnavailableError:
            self.failed_checks += 1
            if self.failed_checks == MAX_FAILED_CHECKS:
                await self.pipeline.stop()
            raise

    async def ping(self) -> None:
        """For clients: they may ask as often as they like, so their failures are not counted."""
        await self.pipeline.check(PING_TIMEOUT_S)

    async def __del__(self) -> None:
        if hasattr(self, "pipeline"):
            await self.pipeline.stop()


class RemotePipelines:
    """The replicas as `deploy.service` wants them. What Ray raises for a lost replica becomes `UnavailableError`."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self.streaming = handle.options(stream=True)
        # Another handle has another router, which `options` makes at once. Among the requests that `PrefixRouter`
        # counts, questions would make a busy replica seem busier: it answers them later.
        control: DeploymentHandle[Any] = serve.get_deployment_handle(handle.deployment_name, handle.app_name)
        self.control = control.options()

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        prefix = prefix_keys(request.prompt_token_ids)
        response: Any = self.streaming.decode.remote(request.SerializeToString(), prefix=prefix)
        try:
            async for event in response:
                yield pb.DecodeEvent.FromString(event)
        except Exception as error:
            raise lost(error) from error
        finally:
            response.cancel()

    async def status(self) -> dict[str, list[pb.TierStatus]]:
        """Of those that answer: one may be on its way out."""
        replicas = await self._ask_all("status")
        return {name: [pb.TierStatus.FromString(status) for status in tiers] for name, tiers in sorted(replicas)}

    async def check(self) -> None:
        """Raise `UnavailableError` unless one of them can serve."""
        try:  # the one that Serve chooses; where there is none, Serve would wait
            async with asyncio.timeout(ASK_TIMEOUT_S):
                await self.control.ping.remote()
        except Exception as error:
            log.info("a replica cannot serve: %s", lost(error))
            if not await self._ask_all("ping"):
                raise UnavailableError("no replica can serve") from None

    async def _ask_all(self, question: str) -> list[Any]:
        """The answers of those replicas that have one."""
        try:
            broadcast = self.control.broadcast(question)
            answers = await broadcast.results_async(timeout_s=ASK_TIMEOUT_S, return_exceptions=True)
        except Exception as error:
            log.warning("not all replicas say their %s: %r", question, error)
            return []
        for failed in (answer for answer in answers if isinstance(answer, Exception)):
            log.info("a replica does not say its %s: %s", question, lost(failed))
        return [answer for answer in answers if not isinstance(answer, BaseException)]


def lost(error: Exception) -> Exception:
    """The error as callers should see it."""
    if isinstance(error, TriForceError):
        return error
    if isinstance(error, ray.exceptions.RayTaskError):  # an error of the replica's code: nobody's but ours
        return error
    if isinstance(error, ray.exceptions.RayError | RayServeException):
        return UnavailableError("the replica that served the request is gone; try again")
    return error
