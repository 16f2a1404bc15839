"""Server-sent events: formats them, keeps idle streams alive, and closes the source however a stream ends."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


# What FastAPI's `responses` say of a whole answer and of a stream. OpenAPI 3.1 cannot describe the events of a stream.
WHOLE_OR_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer as an object; with `stream: true` its chunks as server-sent events, each with a"
        " chunk as JSON, the last with `[DONE]`",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}


class EventStream(StreamingResponse):
    """Server-sent events; however the response ends, `source` is closed."""

    def __init__(self, events: AsyncGenerator[str, None], source: AsyncGenerator[Any, None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self.source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.source.aclose()


async def with_idle(source: AsyncGenerator[T, None], idle_s: float) -> AsyncGenerator[T | None, None]:
    """The items of `source`, and None whenever none came for `idle_s` seconds."""
    async with aclosing(source):
        while True:
            coming = asyncio.ensure_future(anext(source))
            try:
                while not (await asyncio.wait({coming}, timeout=idle_s))[0]:
                    yield None
            finally:
                if not coming.done():
                    coming.cancel()
                    await asyncio.wait({coming})
            try:
                item = coming.result()
            except StopAsyncIteration:
                return
            yield item
