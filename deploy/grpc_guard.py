"""What every call of the Generation service passes: id, API key, report of errors, and a line of the log.

The guarded methods never raise but report errors through the context, because Serve logs a traceback for everything
that a method raises, even for mistakes of clients. A stream passes its context on only with an item, so an error
follows an empty chunk, which the SDK skips.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import Message
from ray.serve.grpc_util import RayServegRPCContext

from deploy.calls import REQUEST_ID, SOUND_ID, Call, begin, checked_id
from deploy.grpc_errors import status_of
from deploy.grpc_services import parsed
from deploy.keys import ApiKeys
from deploy.service import Service
from deploy.tracing import Trace


class Guarded(Protocol):
    """What has methods that are guarded."""

    service: Service
    keys: ApiKeys


Owner = TypeVar("Owner", bound=Guarded)
Asked = TypeVar("Asked", bound=Message)
Answer = TypeVar("Answer")
Unary = Callable[[Owner, Asked, RayServegRPCContext], Awaitable[Answer]]
GuardedUnary = Callable[[Owner, Asked | bytes, RayServegRPCContext], Coroutine[Any, Any, Answer]]
Streaming = Callable[[Owner, Asked, RayServegRPCContext], AsyncGenerator[Answer, None]]


def unary(
    kind: type[Asked], empty: Callable[[], Answer]
) -> Callable[[Unary[Owner, Asked, Answer]], GuardedUnary[Owner, Asked, Answer]]:
    """Guards a method that answers once. Where it fails, the answer is `empty`, and gRPC sends the status alone."""

    def guard(method: Unary[Owner, Asked, Answer]) -> GuardedUnary[Owner, Asked, Answer]:
        @functools.wraps(method)
        async def guarded(self: Owner, request: Asked | bytes, grpc_context: RayServegRPCContext) -> Answer:
            with logged(self, method.__name__, grpc_context) as call, reported(call, grpc_context):
                admit(call, self.keys, grpc_context)
                return await method(self, parsed(kind, request), grpc_context)
            return empty()

        return guarded

    return guard


def streaming(
    kind: type[Asked], empty: Callable[[], Answer]
) -> Callable[[Streaming[Owner, Asked, Answer]], Streaming[Owner, Asked, Answer]]:
    """The same for a method that answers with a stream."""

    def guard(method: Streaming[Owner, Asked, Answer]) -> Streaming[Owner, Asked, Answer]:
        @functools.wraps(method)
        async def guarded(
            self: Owner, request: Asked | bytes, grpc_context: RayServegRPCContext
        ) -> AsyncGenerator[Answer, None]:
            with logged(self, method.__name__, grpc_context) as call, reported(call, grpc_context):
                admit(call, self.keys, grpc_context)
                async with aclosing(method(self, parsed(kind, request), grpc_context)) as answers:
                    async for answer in answers:
                        yield answer
                return
            yield empty()

        return guarded

    return guard


@contextmanager
def logged(owner: Guarded, method: str, context: RayServegRPCContext) -> Iterator[Call]:
    """The call, which is logged when the block ends, however it ends."""
    call = Call("grpc", method, status=grpc.StatusCode.OK.name)
    # Serve's proxy has an id for each call, with which its own logs name it: the client's metadata `request_id`, if
    # there is one, whatever is in it.
    given_id = dict(context.trailing_metadata()).get("request_id", "")
    call.id = given_id if SOUND_ID.fullmatch(given_id) else call.id
    call.trace = None if owner.service.tracing is None else Trace.of(context.invocation_metadata())
    begin(call)
    try:
        yield call
    except (asyncio.CancelledError, GeneratorExit):
        call.status = grpc.StatusCode.CANCELLED.name
        raise
    finally:
        owner.service.ended(call)


@contextmanager
def reported(call: Call, context: RayServegRPCContext) -> Iterator[None]:
    """Reports an error of the block to the client, and ends it."""
    try:
        yield
    except Exception as error:
        code, details = status_of(error)
        context.set_code(code)
        context.set_details(details)
        call.status = code.name


def admit(call: Call, keys: ApiKeys, context: RayServegRPCContext) -> None:
    """Check the call's id and key. Raises `InvalidValueError` or `UnauthenticatedError`."""
    pairs = [*context.invocation_metadata()]
    metadata = dict(pairs)
    if REQUEST_ID in metadata:
        call.id = checked_id(metadata[REQUEST_ID])
    context.set_trailing_metadata([(REQUEST_ID, call.id)])  # Serve has no way to set the initial metadata
    call.key = keys.owner(keys.single("authorization", (value for name, value in pairs if name == "authorization")))
