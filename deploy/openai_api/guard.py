"""What every HTTP request passes before its route: CORS, its id, the API key and the limit of its body. Each request is
one line of the log, except probes that succeed.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.calls import REQUEST_ID, Call, begin, checked_id
from deploy.errors import internal_error
from deploy.keys import ApiKeys
from deploy.openai_api.errors import error_response
from deploy.service import Service
from triforce_core.errors import TooLargeError, TriForceError

# Paths that need no key, because they tell only whether the server is there. They are asked all the time, so they are
# logged only where they fail.
OPEN_PATHS = frozenset({"/health", "/ready"})
OPEN_BODY_BYTES = 1024  # of a body that needs no key: no open path has a use for one


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
                most_bytes = OPEN_BODY_BYTES
                if path not in OPEN_PATHS:
                    call.key = self.keys.owner(headers.get("authorization"))
                    most_bytes = self.service.most_body_bytes
                receive = await bounded(receive, headers, most_bytes)
            except TriForceError as error:
                await error_response(error)(scope, receive, tell)
            else:
                await self.app(scope, receive, tell)
        except Exception as error:
            if call.status is None:
                await error_response(error)(scope, receive, tell)
            else:  # the answer has begun, and must not end as if it were whole
                raise RuntimeError(internal_error(error)) from None  # Serve logs what is raised, with the message
        finally:
            if path not in OPEN_PATHS or call.status != 200:
                self.service.ended(call)


async def bounded(receive: Receive, headers: Headers, most_bytes: int) -> Receive:
    """`receive` for a request whose body is within the limit. Raises `TooLargeError` before the body is parsed.

    The HTTP server enforces a stated content-length, unless the body is sent in chunks. Chunks are counted here,
    whatever length is stated beside them.
    """
    if "transfer-encoding" not in headers:
        stated = headers.get("content-length", "").lstrip("0")
        if stated.isascii() and stated.isdecimal():
            check_length(stated, most_bytes)
        return receive
    parts: list[Message] = []
    length, more = 0, True
    while more:
        parts.append(await receive())
        length += len(parts[-1].get("body", b""))
        check_length(str(length), most_bytes)
        more = parts[-1].get("more_body", False)
    rest = iter(parts)

    async def again() -> Message:
        return next(rest, None) or await receive()

    return again


def check_length(length: str, most_bytes: int) -> None:
    """Raise `TooLargeError` if the decimal number is above `most_bytes`. Both are compared as text: a stated length may
    have thousands of digits, more than Python reads as a number.
    """
    most = str(most_bytes)
    if (len(length), length) > (len(most), most):
        raise TooLargeError("body", f"{length} bytes", f"must be at most {most} bytes on this path")
