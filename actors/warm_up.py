"""Before a pipeline serves: its tiers run passes of every kind, and the CPU threads that they decode on are chosen."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from typing import Any

from actors.pipeline import Pipeline
from actors.wire import request_to_proto
from triforce_core.config import Settings
from triforce_core.engine.kept_threads import measuring
from triforce_core.engine.limits import Limits
from triforce_core.engine.thread_search import Arrangement
from triforce_core.engine.warm_up import WarmUp

log = logging.getLogger("ray.serve")  # whose files an operator reads first

Threads = dict[str, tuple[int, int | None]]  # by tier: those that there are, and those that were kept


async def warm_up(pipeline: Pipeline, settings: Settings) -> None:
    """Returns when every tier has run its kinds of passes. Pipelines on one machine take turns."""
    async with measuring():
        limits: Limits = await pipeline.actors.target.limits.remote()
        found = await threads_of(pipeline) if settings.chooses_threads else {}
        kept = {tier: threads for tier, (_, threads) in found.items() if threads is not None}
        if known := len(kept) == len(found):
            await decode_on(pipeline, kept)
        warming = WarmUp(settings, limits, {} if known else {tier: most for tier, (most, _) in found.items()})
        began = time.monotonic()
        await decode(pipeline, warming)
        if not known:
            await decode_on(pipeline, warming.threads, keep=warming.search.done)
        log.info("warmed up in %.1f s; threads %s", time.monotonic() - began, warming.threads or kept)


async def decode(pipeline: Pipeline, warming: WarmUp) -> None:
    """Its requests, with the threads that it wants from round to round."""
    threads = warming.threads
    for request in warming.requests():
        async with aclosing(pipeline.decode(request_to_proto(request))) as events:
            async for event in events:
                if not warming.committed(len(event.token_ids)):
                    break
                if warming.threads != threads:
                    threads = warming.threads
                    await decode_on(pipeline, threads)


async def threads_of(pipeline: Pipeline) -> Threads:
    """Of each tier that has a choice, the target first."""
    found: list[Threads] = await asyncio.gather(*(actor.threads.remote() for actor in pipeline.actors.each()))
    return {tier: threads for each in reversed(found) for tier, threads in each.items() if threads[0] > 1}


async def decode_on(pipeline: Pipeline, threads: Arrangement, *, keep: bool = False) -> None:
    calls: list[Any] = [actor.decode_on.remote(threads, keep=keep) for actor in pipeline.actors.each()]
    await asyncio.gather(*calls)
