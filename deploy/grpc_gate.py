"""What Serve's gRPC proxy asks of a call before it reads the call's message, and of a client while it sends answers.

The proxy reads messages of many MiB. Without this gate it would read them for anybody, and pass them to the gateway,
which only then looks at the key.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, NoReturn

import grpc

from deploy.calls import REQUEST_ID
from deploy.errors import OverloadedError
from deploy.grpc_errors import status_of
from deploy.keys import keys_of
from triforce_core.errors import DeadlineError, InvalidValueError, TriForceError

KEYS = "TRIFORCE_API_KEYS"  # an environment variable with the value of `server.api_keys`, for the proxies
MAX_CALLS = 512
MAX_OPEN_BYTES = 1024  # of a message that needs no key
MESSAGE_S = 10.0  # from the call until its message has come
LONG_BYTES, TRIM_S = 1 << 20, 5.0
TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc, which keeps the memory of long messages
UNREAD_S = 30.0  # the client takes nothing of what waits for it
Context = grpc.aio.ServicerContext[Any, bytes]
Handler = Any  # grpc.RpcMethodHandler, whose behaviours are typed for servers without asyncio


class Gate(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # it has no arguments when it runs
    """The methods of one service, by path. A service that is open needs no key, and takes short messages only."""

    def __init__(self, handlers: Mapping[str, Handler], *, is_open: bool) -> None:
        self._method_handlers = handlers  # Serve replaces them, under this name, by its own
        self.is_open = is_open
        self.keys = keys_of(os.environ.get(KEYS) or None)
        self.calls = set[asyncio.Task[Any]]()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        """The handler for a call, which gRPC asks for in the task of the call and before it reads the message."""
        handler = self._method_handlers.get(handler_call_details.method)
        if handler is None:
            return None
        call = asyncio.current_task()
        assert call is not None
        metadata = {name: value for name, value in handler_call_details.invocation_metadata if isinstance(value, str)}
        try:
            if not self.is_open:
                self.keys.owner(metadata.get("authorization"))
            if len(self.calls) >= MAX_CALLS:
                raise OverloadedError(f"{MAX_CALLS} calls are open; try again later")
        except TriForceError as error:
            return grpc.stream_unary_rpc_method_handler(refusal(error, metadata.get(REQUEST_ID, "")))
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)

        async def once(unread: object, context: Context) -> bytes:
            return await handler.unary_unary(await self.message(context), context)  # type: ignore[no-any-return]

        async def stream(unread: object, context: Context) -> None:
            if not await sent(handler.unary_stream(await self.message(context), context), context):
                self.calls.discard(call)  # an error reaches the client after what waits for it, or never
                await refusal(DeadlineError(f"the client took nothing for {UNREAD_S:g} s"))(None, context)

        # To gRPC these take streams of messages, which it reads when they ask.
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream)
        return grpc.stream_unary_rpc_method_handler(once)

    async def message(self, context: Context) -> bytes:
        try:
            message = await asyncio.wait_for(context.read(), MESSAGE_S)
        except TimeoutError:
            await refusal(DeadlineError(f"no message came within {MESSAGE_S:g} s"))(None, context)
        if not isinstance(message, bytes):  # the client has ended its stream without one
            await refusal(InvalidValueError("request", None, "must be one message"))(None, context)
        if TRIM is not None and len(message) > LONG_BYTES:
            asyncio.get_running_loop().call_later(TRIM_S, TRIM, 0)
        if self.is_open and len(message) > MAX_OPEN_BYTES:
            rule = f"must be at most {MAX_OPEN_BYTES} bytes for this service"
            await refusal(InvalidValueError("request", f"{len(message)} bytes", rule))(None, context)
        return message


def refusal(error: TriForceError, call_id: str = "") -> Callable[[Any, Context], Awaitable[NoReturn]]:
    """A handler that reads no message and answers with the error."""

    async def refuse(unread: object, context: Context) -> NoReturn:
        await context.abort(*status_of(error), trailing_metadata=((REQUEST_ID, call_id),) if call_id else ())

    return refuse


async def sent(answers: AsyncGenerator[bytes, None], context: Context) -> bool:
    """Send the answers; False if the client takes nothing for `UNREAD_S` seconds. Waiting for an answer does not count.

    The answers end with this function, however it ends.
    """
    async with aclosing(answers):
        async for answer in answers:
            try:
                await asyncio.wait_for(context.write(answer), UNREAD_S)
            except TimeoutError:
                return False
    return True
