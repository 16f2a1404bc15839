"""What Serve's HTTP server needs before it serves: limits for its connections, and headers that it can read."""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS


def middlewares() -> list[Middleware]:
    """Serve calls this where its HTTP server starts: `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names it.

    Serve has no setting for the class of the server's connections, so the default is changed where uvicorn looks it up.
    """
    HTTP_PROTOCOLS["auto"] = "deploy.connection:Connection"
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
