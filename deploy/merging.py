"""Merges asynchronous generators into one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all sources as they come. The first error ends all; so does closing the generator."""
    coming = {asyncio.ensure_future(anext(source)): source for source in sources}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = coming.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                coming[asyncio.ensure_future(anext(source))] = source
                yield item
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for source in sources:
            await source.aclose()
