"""What Serve's own servers need before they serve: headers that Serve can read, and addresses that are not public."""

from typing import Any

from grpc.aio._server import Server
from ray.util import get_node_ip_address
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.front import LOOPBACK


def middlewares() -> list[Middleware]:
    """Serve calls this where its HTTP server starts: `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names it."""
    stay_on_loopback()
    return [Middleware(ReadableHeaders)]


def stay_on_loopback() -> None:
    """Serve's gRPC servers listen on all interfaces. Where Ray is on the loopback, those that this process makes from
    now on are too. Serve has no setting for it.
    """
    server: Any = Server
    insecure, secure = server.add_insecure_port, server.add_secure_port
    if get_node_ip_address() == LOOPBACK:
        server.add_insecure_port = lambda self, address: insecure(self, address.replace("[::]", LOOPBACK))
        server.add_secure_port = lambda self, address, *given: secure(self, address.replace("[::]", LOOPBACK), *given)


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
