"""Sends answers, whole or as server-sent events: formats these, keeps idle streams alive, and closes the source however
a stream ends.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from deploy.openai_api.large import json_response
from deploy.parts import Part

IDLE_S = 10.0  # an idle stream is kept alive this often, so that clients do not take it for dead
COMMENT = ": waiting\n\n"  # which every reader of events passes over
T = TypeVar("T")


class Answer(Protocol):
    """The answer to one request, of one or more completions, as it is made of their parts."""

    count: int  # of completions
    alive: str  # what keeps a stream alive while nothing else is sent

    def events(self, part: Part) -> Iterable[str]:
        """What a part adds, as server-sent events."""
        ...

    def last_events(self) -> Iterable[str]:
        """What follows the last part of the last completion."""
        ...

    def failed(self, error: Exception) -> str:
        """The event of an error, which ends the stream."""
        ...

    def add(self, part: Part) -> None:
        """Keep what a part adds to the whole answer. Of one answer either this or `events` is called."""
        ...

    def whole(self) -> dict[str, Any]:
        """The whole answer, after its last part. May take long: not for an event loop."""
        ...


async def sent(answer: Answer, parts: AsyncGenerator[Part, None], *, stream: bool | None) -> Response:
    """The answer, whole or as events. What is raised before the first event is raised here."""
    if not stream:
        async with aclosing(parts):
            async for part in parts:
                answer.add(part)
        return await json_response(await asyncio.to_thread(answer.whole))  # some have a hundred thousand entries
    coming = Coming(parts)
    try:
        begun = await coming.within(IDLE_S)
        return EventStream(events(answer, coming, idle=not begun), coming)
    except BaseException:
        await coming.close()
        raise


async def events(answer: Answer, coming: "Coming[Part]", *, idle: bool) -> AsyncGenerator[str, None]:
    """The answer's events, and a sign of life whenever nothing was sent for `IDLE_S` seconds, be it that no part came
    or that the parts have nothing to show, such as a tool call's beginning; at once if `idle`.
    """
    ended, clock = 0, asyncio.get_running_loop().time
    until = clock() + (0 if idle else IDLE_S)
    try:
        while ended < answer.count:
            if not await coming.within(max(0, until - clock())):
                yield answer.alive
                until = clock() + IDLE_S
                continue
            part = coming.take()
            shown = False
            for text in answer.events(part):
                shown = True
                yield text
            if not shown and clock() >= until:
                shown = True
                yield answer.alive
            until = clock() + IDLE_S if shown else until
            ended += part.done is not None
        for text in answer.last_events():
            yield text
    except Exception as error:  # the HTTP status is already sent, so the error goes into an event
        yield answer.failed(error)


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


def named_event(content: dict[str, Any]) -> str:
    """An event whose type stands in its own line, too."""
    return f"event: {content['type']}\n{event(content)}"


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
