"""Reads large bodies and writes large answers outside the event loop, which serves all other requests meanwhile."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.requests import Request

from deploy.bounded_json import bounded_loads
from deploy.openai_api.errors import error_response, malformed_response
from triforce_core.errors import InvalidValueError

LARGE_BYTES = 1 << 16  # of a body; a smaller one is read within a millisecond or two
ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
DEPTH = 5  # levels of an answer whose entries are written one by one; those of logprobs are on the last


class LargeBodyRoute(APIRoute):
    """A route whose body, if it is large, is parsed and validated in a thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, field = super().get_route_handler(), self.body_field
        if field is None:
            return handle

        def read(content: bytes, path: str) -> Any:
            """The validated body, or the answer that refuses it. What was raised would hold the body for long."""
            try:
                given = bounded_loads(content, "body")
            except InvalidValueError as error:
                return error_response(error, path)
            found, errors = field.validate(given, loc=("body",))
            return malformed_response(RequestValidationError(errors), path) if errors else found

        async def handler(request: Request) -> Response:
            content = await request.body()
            if len(content) <= LARGE_BYTES or "json" not in request.headers.get("content-type", "").lower():
                return await handle(request)
            try:
                found = await asyncio.to_thread(read, content, request.url.path)
            except (ValueError, RecursionError):  # no JSON, which FastAPI then reports
                return await handle(request)
            return found if isinstance(found, Response) else await handle(Validated(request, content, found))

        return handler


class Validated(Request):
    """A request whose body is already validated."""

    def __init__(self, request: Request, content: bytes, found: Any) -> None:
        super().__init__(request.scope, request.receive)
        self.content, self.found = content, found

    async def body(self) -> bytes:
        return self.content

    async def json(self) -> Any:
        return self.found


async def json_response(content: dict[str, Any]) -> Response:
    """The answer as JSON, written in a thread."""
    # Half a surrogate pair, which the arguments of a call may hold, becomes the escape that JSON has for it.
    text = await asyncio.to_thread(lambda: written(content).encode(errors="backslashreplace"))
    return Response(text, media_type="application/json")


def written(value: Any, depth: int = DEPTH) -> str:
    """The value as JSON, its first levels entry by entry: Python's encoder lets no other thread run meanwhile."""
    if depth and isinstance(value, dict):
        return "{" + ",".join(f"{ENCODE(name)}:{written(each, depth - 1)}" for name, each in value.items()) + "}"
    if depth and isinstance(value, list | tuple):
        return "[" + ",".join(written(each, depth - 1) for each in value) + "]"
    return ENCODE(value)
