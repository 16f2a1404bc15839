"""Warms up a pipeline before it serves: runs passes of every kind, and chooses the CPU threads of decoding."""

import asyncio
import logging
import time
from contextlib import aclosing
from typing import Any

from actors.pipeline import Pipeline
from actors.running_target import RunningTarget
from actors.wire import request_to_proto
from triforce_core.config import Settings
from triforce_core.engine.kept_threads import measuring
from triforce_core.engine.limits import Limits
from triforce_core.engine.thread_search import Arrangement
from triforce_core.engine.warm_up import WarmUp

log = logging.getLogger("ray.serve")  # operators read this logger's files first

WARM_UP_S = 600.0  # after this time the pipeline serves without being warm; health checks then detect a hang

Threads = dict[str, tuple[int, int | None]]  # by tier: all threads, and the number kept earlier; None: unknown


async def warm_up(pipeline: Pipeline, settings: Settings) -> None:
    """Run passes of every kind in every tier. Pipelines on one machine take turns at measuring threads."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(WARM_UP_S):
            if settings.chooses_threads and unknown(await threads_of(pipeline)):
                async with measuring():
                    await run(pipeline, settings, unknown(await threads_of(pipeline)))
            else:
                await run(pipeline, settings, {})
    except TimeoutError:
        log.warning("the tiers are not warm after %.0f s: the first requests will be slow", WARM_UP_S)
    log.info("warmed up in %.1f s", time.monotonic() - began)


def unknown(found: Threads) -> Arrangement:
    """By tier, the most threads to try; empty if the best number is known for all. Else all are measured again."""
    known = all(kept is not None for _, kept in found.values())
    return {} if known else {tier: most for tier, (most, _) in found.items()}


async def run(pipeline: Pipeline, settings: Settings, most_threads: Arrangement) -> None:
    """Decode the warm-up requests. If threads are to be chosen, set the best numbers and keep them for later starts."""
    limits: Limits = await pipeline.actors.target.limits.remote()
    warming = WarmUp(settings, limits, most_threads)
    await decode(pipeline, warming)
    if most_threads:
        pipeline.threads = warming.search.best
        await decode_on(pipeline, warming.search.best, keep=True)


async def decode(pipeline: Pipeline, warming: WarmUp) -> None:
    """Decode the requests of `warming`, with the threads that it sets for each round."""
    threads: Arrangement = {}
    for request in warming.requests():
        async with aclosing(pipeline.decode(request_to_proto(request))) as events:
            async for event in events:
                if not warming.round_ended(len(event.token_ids)):
                    break
                if warming.threads != threads:
                    threads = warming.threads
                    await decode_on(pipeline, threads)


async def warm_up_again(pipeline: Pipeline, target: RunningTarget, settings: Settings) -> None:
    """The first passes of a target that was started anew: a few, as threads are known and kernels are on disk."""
    await pipeline.actors.target.decode_on.remote(pipeline.threads)
    limits: Limits = await pipeline.actors.target.limits.remote()
    request = request_to_proto(next(WarmUp(settings, limits, {}).requests()))
    async with aclosing(target.decode(request.SerializeToString())) as events:
        async for _ in events:
            pass


async def threads_of(pipeline: Pipeline) -> Threads:
    """The threads of each tier that has more than one, the target first."""
    found: list[Threads] = await asyncio.gather(*(actor.threads.remote() for actor in pipeline.actors.each()))
    return {tier: threads for each in reversed(found) for tier, threads in each.items() if threads[0] > 1}


async def decode_on(pipeline: Pipeline, threads: Arrangement, *, keep: bool = False) -> None:
    calls: list[Any] = [actor.decode_on.remote(threads, keep=keep) for actor in pipeline.actors.each()]
    await asyncio.gather(*calls)
