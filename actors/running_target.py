"""A running target as its owner sees it: a process, the channel to it, and the marks of what it works on."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import psutil
from ray.actor import ActorHandle

from actors.admission import Address
from actors.encryption import channel
from actors.links import CHANNEL_OPTIONS
from actors.marks import SLOT, Marks
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import TargetStub
from triforce_core.errors import (
    ContextLengthError,
    DeadlineError,
    FingerprintError,
    InvalidValueError,
    UnavailableError,
)

log = logging.getLogger(__name__)

DECODE = f"/{pb.DESCRIPTOR.services_by_name['Target'].full_name}/Decode"  # the method's path, as in the generated stub
SLOTS = itertools.count()


@dataclass(frozen=True, slots=True)
class TargetProcess:
    """The process of a target actor, and those that follow it. `process` is None where it cannot be seen from here."""

    process: psutil.Process | None
    followers: tuple[psutil.Process, ...] = ()

    @classmethod
    def of(cls, pid: int, followers: Iterable[int] = ()) -> TargetProcess:
        return cls(seen(pid), tuple(each for each in map(seen, followers) if each is not None))

    @property
    def dead(self) -> bool:
        """Whether it is known to have ended. Ray may not have reaped it yet."""
        if self.process is None:
            return False
        try:
            return not self.process.is_running() or self.process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def kill(self) -> None:
        """End the process and its followers at once, stopped (suspended) ones too, because one that hangs would keep
        the next target waiting. A new process that has got the id of an ended one is left alone.
        """
        for process in (self.process, *self.followers):
            if process is not None:
                with suppress(psutil.Error):
                    process.kill()


def seen(pid: int) -> psutil.Process | None:
    """The process of this id; None where it cannot be seen from here."""
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


class RunningTarget:
    """One target process that serves, from its start to its end."""

    def __init__(self, address: Address, pid: int, marks: Marks | None, followers: Iterable[int] = ()) -> None:
        """`marks`: None if they cannot be read. `followers`: the ids of the processes that follow it."""
        self.address, self.pid, self.process, self.marks = address, pid, TargetProcess.of(pid, followers), marks
        self.channel = channel(grpc.aio, address.place, CHANNEL_OPTIONS)

    @classmethod
    async def started(cls, actor: ActorHandle[Any]) -> RunningTarget:
        """Load the target, which may be loaded already, and return it once it serves."""
        address: Address = await actor.start.remote()
        pid, followers, path = await actor.identity.remote()
        try:
            marks = Marks.of(path)
        except OSError as error:
            log.warning("the target's marks cannot be read: %s", error)
            marks = None
        return cls(address, pid, marks, followers)

    async def decode(self, request: bytes) -> AsyncGenerator[bytes, None]:
        """The serialized events of a serialized request. Raises `InvalidValueError`, `FingerprintError`,
        `DeadlineError`, or `UnavailableError`, which says whether the request is suspect, if that is known.
        """
        method = self.channel.unary_stream(DECODE, request_serializer=None, response_deserializer=None)
        slot = next(SLOTS)
        call = method(request, metadata=((SLOT, str(slot)), *self.address.metadata))
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            raise from_status(error, suspect=self._suspect(slot)) from None
        except asyncio.CancelledError:
            raise_if_closed()
            raise
        finally:
            call.cancel()

    def _suspect(self, slot: int) -> bool | None:
        known = self.marks is not None and self.marks.any()
        return self.marks.has(slot) if self.marks is not None and known else None

    async def status(self, timeout_s: float) -> pb.TierStatus:
        """Raises `UnavailableError` if the target does not report within `timeout_s` seconds."""
        try:
            status: pb.TierStatus = await TargetStub(self.channel).Status(
                pb.StatusRequest(), timeout=timeout_s, metadata=self.address.metadata
            )
        except grpc.aio.AioRpcError as error:
            raise unavailable(error) from None
        except asyncio.CancelledError:
            raise_if_closed()
            raise
        return status

    async def check(self, timeout_s: float) -> None:
        """Raise `UnavailableError` unless the target reports within `timeout_s` seconds that it can serve."""
        if not (await self.status(timeout_s)).ready:
            raise UnavailableError("the target tier has failed, or hangs")

    async def close(self) -> None:
        """Close the connection; calls in progress end."""
        await self.channel.close(grace=None)
        if self.marks is not None:
            self.marks.close()


def raise_if_closed() -> None:
    """gRPC ends a call whose channel is closed with `asyncio.CancelledError`, though nobody cancels the task."""
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        raise UnavailableError("the connection to the target was closed; try again") from None


def from_status(error: grpc.aio.AioRpcError, *, suspect: bool | None) -> Exception:
    """The typed error for the gRPC status of a request to the target tier."""
    details = error.details() or ""
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidValueError.parsed(details)
    if error.code() is grpc.StatusCode.OUT_OF_RANGE:
        return ContextLengthError.parsed(details)
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return FingerprintError(details)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(details)
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:  # another process has its port, and never saw the request
        return unavailable(error, suspect=False)
    # UNAVAILABLE and CANCELLED mean that the target has failed or is gone. With any other code the target has answered
    # this request with an error, so the request counts as the cause.
    gone = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return unavailable(error, suspect=suspect if gone else True)


def unavailable(error: grpc.aio.AioRpcError, *, suspect: bool | None = None) -> UnavailableError:
    log.warning("the target tier answered %s: %s", error.code().name, error.details())
    return UnavailableError("the target tier cannot serve; try again", suspect=suspect)
