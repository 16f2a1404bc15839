"""What Serve's gRPC proxy asks of a call before it reads the call's message, and of a client while it sends answers.

The proxy reads messages of many MiB. Without this gate it would read them for anybody, and pass them to the gateway,
which only then looks at the key.
"""

import asyncio
import ctypes
import os
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any, NoReturn

import grpc

from deploy.calls import REQUEST_ID
from deploy.errors import OverloadedError
from deploy.grpc_errors import status_of
from deploy.keys import keys_of
from triforce_core.errors import DeadlineError, InvalidValueError, TriForceError

PEER = "x-triforce-peer"  # metadata with the client's address, from the front
KEYS = "TRIFORCE_API_KEYS"  # an environment variable with the value of `server.api_keys`, for the proxies
MAX_CALLS = 1024
MAX_CALLS_PER_KEY = MAX_CALLS // 2
MAX_OPEN_CALLS_PER_HOST = 16  # of a service that needs no key
MAX_OPEN_BYTES = 1024  # of a message that needs no key
MESSAGE_S, OPEN_MESSAGE_S = 60.0, 10.0  # from the call until its message has come
UNREAD_S = 30.0  # the client does not take an answer that waits for it
LONG_BYTES, TRIM_S = 1 << 20, 5.0
TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc, which keeps the memory of long messages
Context = grpc.aio.ServicerContext[Any, bytes]
Handler = Any  # grpc.RpcMethodHandler, whose behaviours are typed for servers without asyncio


class Gate(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # it has no arguments when it runs
    """The methods of one service, by path. A service that is open needs no key, and takes short messages only."""

    def __init__(self, handlers: Mapping[str, Handler], *, is_open: bool) -> None:
        self._method_handlers = handlers  # Serve replaces them, under this name, by its own
        self.is_open = is_open
        self.keys = keys_of(os.environ.get(KEYS) or None)
        self.calls = Counter[str]()  # by the name of the key, or by the host

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler:
        """The handler for a call, of streams for gRPC, which reads and writes those only when it is asked to."""
        handler = self._method_handlers.get(handler_call_details.method)
        return handler and grpc.stream_stream_rpc_method_handler(partial(self.call, handler))

    async def call(self, handler: Handler, unread: object, context: Context) -> None:
        try:
            caller = self.admitted(context)
        except TriForceError as error:
            await refuse(error, context)
        self.calls[caller] += 1
        try:
            message = await self.message(context)
            given = handler.unary_stream if handler.response_streaming else partial(only, handler.unary_unary)
            await send(given(message, context), context)
        except TriForceError as error:
            refused = error
        else:
            return
        finally:
            self.calls[caller] -= 1
            if not self.calls[caller]:
                del self.calls[caller]
        # Not counted, because it may take as long as the connection: it comes after what the client has not taken.
        await refuse(refused, context)

    def admitted(self, context: Context) -> str:
        """Who calls. Raises `UnauthenticatedError` or `OverloadedError`."""
        if self.is_open:
            caller, most = host_of(context), MAX_OPEN_CALLS_PER_HOST
        else:
            pairs = context.invocation_metadata() or ()
            found = (value for name, value in pairs if name == "authorization")
            caller = self.keys.owner(self.keys.single("authorization", found))
            most = MAX_CALLS_PER_KEY if caller else MAX_CALLS
        if self.calls[caller] >= most or self.calls.total() >= MAX_CALLS:
            raise OverloadedError(f"{self.calls[caller]} calls of this caller are open; try again later")
        return caller

    async def message(self, context: Context) -> bytes:
        """The call's message. Raises `DeadlineError` or `InvalidValueError`."""
        limit_s = OPEN_MESSAGE_S if self.is_open else MESSAGE_S
        try:
            message = await asyncio.wait_for(context.read(), limit_s)
        except TimeoutError:
            raise DeadlineError(f"no message came within {limit_s:g} s") from None
        if not isinstance(message, bytes):  # the client has ended its stream without one
            raise InvalidValueError("request", None, "must be one message")
        if TRIM is not None and len(message) > LONG_BYTES:
            asyncio.get_running_loop().call_later(TRIM_S, TRIM, 0)
        if self.is_open and len(message) > MAX_OPEN_BYTES:
            rule = f"must be at most {MAX_OPEN_BYTES} bytes for this service"
            raise InvalidValueError("request", f"{len(message)} bytes", rule)
        return message


def host_of(context: Any) -> str:
    """The address of the client: as the front gives it or, where there is no front, that of the connection."""
    return given(context, PEER) or str(context.peer()).rpartition(":")[0]


def given(context: Any, name: str) -> str:
    """A value of the call's metadata; empty if there is none, or if it is no text."""
    value = dict(context.invocation_metadata() or ()).get(name, "")
    return value if isinstance(value, str) else ""


async def refuse(error: TriForceError, context: Context) -> NoReturn:
    """End the call with the error."""
    call_id = given(context, REQUEST_ID)
    await context.abort(*status_of(error), trailing_metadata=((REQUEST_ID, call_id),) if call_id else ())


async def only(behaviour: Any, message: bytes, context: Context) -> AsyncGenerator[bytes, None]:
    yield await behaviour(message, context)


async def send(answers: AsyncGenerator[bytes, None], context: Context) -> None:
    """Send the answers, which end with this. Raises `DeadlineError` if one is not taken within `UNREAD_S` seconds."""
    try:
        async for answer in answers:
            try:
                async with asyncio.timeout(UNREAD_S):
                    await context.write(answer)
            except TimeoutError:
                raise DeadlineError(f"the client did not take an answer within {UNREAD_S:g} s") from None
    finally:
        await asyncio.shield(stop(answers))  # a call that ends may be cancelled meanwhile


async def stop(answers: AsyncGenerator[bytes, None]) -> None:
    """Cancel the request that the answers belong to. Serve's proxy does so only where a cancellation finds it waiting
    for the next answer; one that comes while an answer is written would leave the request to run to its end.
    """
    waiting = asyncio.ensure_future(anext(answers, b""))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await answers.aclose()
