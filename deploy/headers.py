"""Middleware of Serve's proxy that makes headers readable before the proxy handles a request."""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send


def middlewares() -> list[Middleware]:
    """Serve calls this where its HTTP server starts: `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names it."""
    return [Middleware(ReadableHeaders)]


class ReadableHeaders:
    """Makes the value of each header UTF-8. Serve decodes some of them, such as a request's id, before the gateway sees
    the request, and would answer with 500 to other bytes. The gateway refuses such a value with its own error.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" in scope:
            scope = {**scope, "headers": [(name, readable(value)) for name, value in scope["headers"]]}
        await self.app(scope, receive, send)


def readable(value: bytes) -> bytes:
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()  # any bytes are valid Latin-1
    return value
