"""What every HTTP request passes before its route: CORS, its id, the API key, a place, and the limits of its body. Each
request is one line of the log, except probes that succeed.
"""

import asyncio
from collections.abc import Iterator

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.calls import REQUEST_ID, Call, begin, checked_id
from deploy.errors import SlowBodyError, internal_error
from deploy.keys import ApiKeys
from deploy.openai_api.errors import error_response
from deploy.service import Service
from deploy.tracing import Trace
from triforce_core.errors import TooLargeError, TriForceError

# Paths that need no key, because they tell only whether the server is there. They are asked all the time, so they are
# logged only where they fail. Nothing reads their bodies.
OPEN_PATHS = frozenset({"/health", "/ready"})
# A body that comes more slowly is refused, because its request holds a place.
BODY_GRACE_S, LEAST_BODY_RATE = 10.0, 16 << 10  # bytes a second


def guarded(app: FastAPI, service: Service, keys: ApiKeys) -> FastAPI:
    """The application behind its guard. The CORS headers are outermost, so that browsers may read refusals too."""
    app.add_middleware(Guard, service=service, keys=keys)
    if origins := service.settings.server.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, "retry-after"],
        )
    return app


class Guard:
    """Middleware for requests. An answer that it gives itself has the shape of all other errors."""

    def __init__(self, app: ASGIApp, service: Service, keys: ApiKeys) -> None:
        self.app, self.service, self.keys = app, service, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        call = begin(Call("http", f"{scope['method']} {path}"[:256]))
        call.trace = None if self.service.tracing is None else Trace.of(headers.items())
        given_id = headers.get(REQUEST_ID)

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                if given_id is None:  # otherwise Serve's proxy, which gives every request an id, returns it itself
                    MutableHeaders(scope=message)[REQUEST_ID] = call.id
            await send(message)

        try:
            try:
                call.id = call.id if given_id is None else checked_id(given_id)
                if path not in OPEN_PATHS:
                    bearer, api_key = (
                        self.keys.single(name, headers.getlist(name)) for name in ("authorization", "x-api-key")
                    )
                    call.key = self.keys.owner(bearer, api_key)
                    if scope["method"] == "POST":
                        with self.service.placed():  # whoever sends slowly holds no more than waiting requests do
                            receive = replayed(await whole(receive, headers, self.service.most_body_bytes), receive)
            except TriForceError as error:
                await error_response(error, path)(scope, receive, tell)
            else:
                await self.app(scope, receive, tell)
        except ClientDisconnect:
            pass  # nobody is there to be told
        except Exception as error:
            if call.status is None:
                await error_response(error, path)(scope, receive, tell)
            else:  # the answer has begun, and must not end as if it were whole
                raise RuntimeError(internal_error(error)) from None  # Serve logs what is raised, with the message
        finally:
            if path not in OPEN_PATHS or call.status != 200:
                self.ended(call, scope)

    def ended(self, call: Call, scope: Scope) -> None:
        if call.trace is not None and "route" in scope:  # FastAPI has found one
            call.trace.route = scope["route"].path
        self.service.ended(call)


async def whole(receive: Receive, headers: Headers, most_bytes: int) -> bytes:
    """The body. Raises `TooLargeError`, where possible before it has come; `SlowBodyError`; `ClientDisconnect`."""
    stated = headers.get("content-length", "").lstrip("0")
    if "transfer-encoding" not in headers and stated.isascii() and stated.isdecimal():
        check_length(stated, most_bytes)
    body, began, more = bytearray(), asyncio.get_running_loop().time(), True
    try:
        async with asyncio.timeout_at(began + BODY_GRACE_S) as limit:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                body += message.get("body", b"")
                check_length(str(len(body)), most_bytes)
                limit.reschedule(began + BODY_GRACE_S + len(body) / LEAST_BODY_RATE)
                more = message.get("more_body", False)
    except TimeoutError:
        rule = f"must come within {BODY_GRACE_S:g} s and a second more for each {LEAST_BODY_RATE} bytes"
        raise SlowBodyError("body", f"{len(body)} bytes so far", rule) from None
    return bytes(body)


def replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` for a request whose body has been read."""
    messages: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def again() -> Message:
        return next(messages, None) or await receive()

    return again


def check_length(length: str, most_bytes: int) -> None:
    """Raise `TooLargeError` above `most_bytes`; compared as text, for a length may have thousands of digits."""
    most = str(most_bytes)
    if (len(length), length) > (len(most), most):
        raise TooLargeError("body", f"{length} bytes", f"must be at most {most} bytes on this path")
