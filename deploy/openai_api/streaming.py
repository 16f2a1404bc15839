"""Server-sent events: formats them, keeps idle streams alive, and closes the source however a stream ends."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, Generic, TypeVar

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


class Coming(Generic[T]):
    """The next item of a source, which is waited for in a task of its own, so that to stop waiting does not stop it."""

    def __init__(self, source: AsyncGenerator[T, None]) -> None:
        self.source = source
        self.next: asyncio.Future[T] | None = None

    async def within(self, seconds: float) -> bool:
        """Whether the item comes in time. Raises what the source raises, `StopAsyncIteration` at its end."""
        if self.next is None:
            self.next = asyncio.ensure_future(anext(self.source))
        done, _ = await asyncio.wait({self.next}, timeout=seconds)
        if done:
            self.next.result()
        return bool(done)

    def take(self) -> T:
        """The item, once it has come."""
        assert self.next is not None, "within() says whether it has come"
        item, self.next = self.next.result(), None
        return item

    async def close(self) -> None:
        """Close the source, also while it works on its next item."""
        if self.next is not None:
            self.next.cancel()
            await asyncio.gather(self.next, return_exceptions=True)
        await self.source.aclose()


class EventStream(StreamingResponse):
    """Server-sent events; however the response ends, their source is closed."""

    def __init__(self, events: AsyncGenerator[str, None], source: Coming[Any]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self.source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.source.close()
