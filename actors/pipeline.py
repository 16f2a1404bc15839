"""One pipeline as its owner sees it: tier actors, and streams of tokens from the target."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from actors.placement import TierActors, place_tiers
from actors.running_target import RunningTarget
from actors.wire import is_notice
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import Settings
from triforce_core.errors import DeadlineError, UnavailableError
from triforce_core.messages import Tier

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 2.0


class Pipeline:
    """One pipeline, used on one asyncio loop.

    If its target dies, the requests in flight end with `UnavailableError`. While the supervisor (`supervisor.py`)
    replaces the target, new requests wait for the new one, or end at once if this pipeline is not `patient`.
    """

    def __init__(self, actors: TierActors) -> None:
        self.actors = actors
        self.target: RunningTarget | None = None  # the latest
        self.serving = asyncio.Event()  # clear before the first target serves, and while a supervisor replaces it
        self.doubted: asyncio.Event | None = None  # set when the target has failed a request; None without a supervisor
        self.patient = True  # whether requests wait while the target is replaced; otherwise they end at once
        self.restarts = 0  # of the target
        self.load_s = 0.0  # how long the first start took
        self.stopped = ""  # why; empty while it runs

    @classmethod
    async def start(cls, settings: Settings, group: PlacementGroup) -> Pipeline:
        """Place the tiers, load them at the same time, and return when every tier serves."""
        pipeline = cls(place_tiers(settings, group))
        await pipeline.connect()
        return pipeline

    async def connect(self) -> None:
        """Load the tiers at the same time; returns when every tier serves."""
        *drafting, target = self.actors.each()
        began = time.monotonic()
        starts = [actor.start.remote() for actor in drafting]
        self.target, *_ = await asyncio.gather(RunningTarget.started(target), *starts)
        self.load_s = time.monotonic() - began
        self.serving.set()

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        """The request's tokens as they are committed, for warm-up and tools: a server passes the events on as they are
        (`reached`). Closing the iterator stops the request. Raises typed errors.
        """
        packed = request.SerializeToString()
        async with self.reached(packed) as (target, asked), aclosing(target.decode(asked)) as events:
            async for each in events:
                event = pb.DecodeEvent.FromString(each)
                if not is_notice(event):
                    yield event

    @asynccontextmanager
    async def reached(self, request: bytes) -> AsyncGenerator[tuple[RunningTarget, bytes], None]:
        """The target for a serialized DecodeRequest, and what to ask it for; the block decodes it. Raises
        `UnavailableError` or `DeadlineError`. If the block raises `UnavailableError`, the target is doubted.
        """
        if self.stopped:  # the channel is closed, and the replica not yet replaced
            raise UnavailableError(self.stopped, suspect=False)
        if not self.serving.is_set():
            request = await self._wait(pb.DecodeRequest.FromString(request))
        target = self.target
        assert target is not None
        try:
            yield target, request
        except UnavailableError:
            self._doubt(target)
            raise

    async def _wait(self, request: pb.DecodeRequest) -> bytes:
        """Wait until the target serves. Returns the request, its `timeout_s` reduced by the time spent waiting."""
        if not self.patient:
            raise UnavailableError("the target tier is being replaced; try again", suspect=False)
        began, limit_s = time.monotonic(), request.timeout_s if request.HasField("timeout_s") else None
        try:
            async with asyncio.timeout(limit_s):
                await self.serving.wait()
        except TimeoutError:
            raise DeadlineError(f"not done within {limit_s:g} s") from None
        if self.stopped:
            raise UnavailableError(self.stopped, suspect=False)
        if limit_s is not None:
            request.timeout_s = max(1e-3, limit_s - (time.monotonic() - began))
        return request.SerializeToString()

    def _doubt(self, target: RunningTarget) -> None:
        """The target has failed a request: the supervisor looks whether it is dead, and new requests wait meanwhile."""
        if self.doubted is not None and target is self.target and not self.stopped:
            self.serving.clear()
            self.doubted.set()

    async def status(self) -> list[pb.TierStatus]:
        """The status of each tier, draft first. A tier that does not answer in time is reported as not ready."""
        answers = await asyncio.gather(*(self._status_of(actor) for actor in self.actors.each()))
        statuses = sorted((each for answer in answers for each in answer), key=lambda each: Tier[each.tier.upper()])
        statuses[-1].restarts = self.restarts
        return statuses

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
        if self.target is None or not self.serving.is_set() or self.stopped:
            raise UnavailableError(self.stopped or "the target tier is being replaced")
        await self.target.check(timeout_s)

    async def stop(self, why: str = "the pipeline was stopped; try again") -> None:
        """End the actors. Requests that are being decoded, or wait, end with `UnavailableError`."""
        self.stopped = self.stopped or why
        self.serving.set()
        if self.target is not None:
            await self.target.close()
        for actor in (*self.actors.each(), *self.actors.followers):
            ray.kill(actor)
