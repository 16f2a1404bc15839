"""One pipeline as its owner sees it: tier actors, and streams of tokens from the target."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from actors.links import CHANNEL_OPTIONS
from actors.placement import TierActors, place_tiers
from actors.wire import is_notice
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import TargetStub
from triforce_core.config import Settings
from triforce_core.errors import DeadlineError, FingerprintError, InvalidValueError, TooLargeError, UnavailableError
from triforce_core.messages import Tier

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 2.0
DECODE = f"/{pb.DESCRIPTOR.services_by_name['Target'].full_name}/Decode"  # the method's path, as in the generated stub


class Pipeline:
    """One pipeline, used on one asyncio loop. Its actors die with the process that created them, as Ray actors do."""

    def __init__(self, actors: TierActors) -> None:
        self.actors = actors
        self.channel: grpc.aio.Channel | None = None
        self.stopped = False

    @classmethod
    async def start(cls, settings: Settings, group: PlacementGroup) -> Pipeline:
        """Place the tiers, load them at the same time, and return when every tier serves."""
        pipeline = cls(place_tiers(settings, group))
        await pipeline.connect()
        return pipeline

    async def connect(self) -> None:
        """Load the tiers at the same time; returns when every tier serves."""
        starts = [actor.start.remote() for actor in self.actors.each()]
        addresses: list[str] = await asyncio.gather(*starts)
        self.channel = grpc.aio.insecure_channel(addresses[-1], options=CHANNEL_OPTIONS)

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        """The request's tokens as they are committed; closing the iterator stops the request.

        Raises `InvalidValueError`, `FingerprintError`, `DeadlineError` or `UnavailableError`.
        """
        async with aclosing(self.relay(request.SerializeToString())) as events:
            async for packed in events:
                event = pb.DecodeEvent.FromString(packed)
                if not is_notice(event):
                    yield event

    async def relay(self, request: bytes) -> AsyncGenerator[bytes, None]:
        """Like `decode`, but with serialized messages: a process that only forwards them need not parse them."""
        assert self.channel is not None
        decode = self.channel.unary_stream(DECODE, request_serializer=None, response_deserializer=None)
        call = decode(request)
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            raise from_status(error) from None
        except asyncio.CancelledError:
            if self.stopped:  # gRPC raises this when its channel is closed; the caller has not cancelled
                raise UnavailableError("the pipeline was stopped; try again") from None
            raise
        finally:
            call.cancel()

    async def status(self) -> list[pb.TierStatus]:
        """The status of each tier, draft first. A tier that does not answer in time is reported as not ready."""
        answers = await asyncio.gather(*(self._status_of(actor) for actor in self.actors.each()))
        return sorted((status for each in answers for status in each), key=lambda status: Tier[status.tier.upper()])

    async def _status_of(self, actor: ActorHandle[Any]) -> list[pb.TierStatus]:
        """The status of each tier in one process."""
        try:
            packed: list[bytes] = await asyncio.wait_for(actor.status.remote(), STATUS_TIMEOUT_S)
            return [pb.TierStatus.FromString(status) for status in packed]
        except (TimeoutError, RayError) as error:
            tiers = [tier.name.lower() for tier, other in self.actors.all().items() if other == actor]
            log.info("no status of %s: %r", " + ".join(tiers), error)
            return [pb.TierStatus(tier=tier) for tier in tiers]

    async def check(self, timeout_s: float) -> None:
        """Raise `UnavailableError` unless the target reports within `timeout_s` seconds that it can serve."""
        assert self.channel is not None
        try:
            status = await TargetStub(self.channel).Status(pb.StatusRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise unavailable(error) from None
        if not status.ready:
            raise UnavailableError("the target tier has failed, or hangs")

    async def stop(self) -> None:
        """End the actors. Requests that are being decoded end with `UnavailableError`."""
        self.stopped = True
        if self.channel is not None:
            await self.channel.close(grace=None)
        for actor in (*self.actors.each(), *self.actors.followers):
            ray.kill(actor)


def from_status(error: grpc.aio.AioRpcError) -> Exception:
    """The typed error for the gRPC status of a request to the target tier."""
    details = error.details() or ""
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidValueError.parsed(details)
    if error.code() is grpc.StatusCode.OUT_OF_RANGE:
        return TooLargeError.parsed(details)
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return FingerprintError(details)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(details)
    return unavailable(error)


def unavailable(error: grpc.aio.AioRpcError) -> UnavailableError:
    log.warning("the target tier answered %s: %s", error.code().name, error.details())
    return UnavailableError("the target tier cannot serve; try again")
