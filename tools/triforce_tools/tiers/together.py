"""Several requests decoded together in tier actors: how `triforce bench sweep` runs the points of the axis concurrency.

**What is measured.** Tokens per second of all requests, from the moment when the last of them has its first token until
they have decoded `output` tokens each, on average, or one of them ends. So no prompt is being read and no request is
missing while time is taken. Prompts are read one after another, and a request whose prompt was early decodes meanwhile:
so each may decode more tokens than are measured (`LEAD`), and all are stopped when the window closes. A mode that is
fast has got further by the time when the window opens, and is measured on text that comes a little later.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import ray

from actors.pipeline import Pipeline
from actors.wire import request_to_proto, stats_from_proto
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import Settings
from triforce_core.engine.limits import target_limits
from triforce_core.errors import require
from triforce_core.kv.ranges import rounded_up
from triforce_core.models.files import load_config, load_tokenizer
from triforce_tools.bench.axes import Mode, Point, changed
from triforce_tools.bench.pairs import Measured, pooled
from triforce_tools.bench.sweep import Requests, Workload
from triforce_tools.tiers.arrangement import Arrangement, Decoded, Run

LEAD = 1024  # tokens that a request may decode while the prompts of others are read


class Together:
    """Three tier actors with room for the largest point."""

    def __init__(self, arrangement: Arrangement, settings: Settings, requests: Requests) -> None:
        self.arrangement, self.settings, self.requests = arrangement, settings, requests

    @property
    def about(self) -> dict[str, Any]:
        return {"micro_batches": self.settings.micro_batches, "colocate": self.settings.placement.colocate}

    def run(self, point: Point, mode: Mode, output: int) -> Measured:
        longest = longest_output(self.settings, point.context, output)
        messages = [request_to_proto(request) for request in self.requests.at(point, mode, longest)]
        began = time.monotonic()
        decoded = self.arrangement.wait(decode_together(self.arrangement.pipeline, messages, output))
        run = Run(decoded, [], 0)
        rule = f"is too short for {point.requests} requests: the first ended before the last had begun"
        require(run.end > run.begin and run.num_tokens > 0, "output", output, rule)
        stats = pooled(each.stats[-1] for each in decoded)
        return Measured(1e3 / run.tokens_per_s, run.begin - began, [each.tokens for each in decoded], stats)


class Window:
    """Counts what is decoded from the moment when every request has its first token."""

    def __init__(self, requests: int, tokens: int) -> None:
        self.waiting, self.left, self.closed = requests, tokens, False

    def take(self, decoded: Decoded, tokens: int) -> None:
        """Count an arrival of so many tokens."""
        if not decoded.arrivals:
            self.waiting -= 1
        elif not self.waiting:
            self.left -= tokens
        self.closed = self.closed or self.left <= 0


async def decode_together(pipeline: Pipeline, messages: Sequence[pb.DecodeRequest], output: int) -> list[Decoded]:
    """Decode all requests until they have decoded `output` tokens each, on average, since the last had its first."""
    decoded = [Decoded() for _ in messages]
    window = Window(len(messages), output * len(messages))

    async def one(message: pb.DecodeRequest, into: Decoded) -> None:
        async with aclosing(pipeline.decode(message)) as events:
            async for event in events:
                window.take(into, len(event.token_ids))
                into.arrivals.append((time.monotonic(), len(event.token_ids)))
                into.tokens += event.token_ids
                into.stats.append(stats_from_proto(event.stats))
                if window.closed:
                    return
        window.closed = True  # one request has ended

    await asyncio.gather(*map(one, messages, decoded))
    return decoded


def longest_output(settings: Settings, context: int, output: int) -> int:
    """The most output tokens of a request: those that are measured, and a lead, as far as the target's context goes."""
    limit = target_limits(load_config(settings.target.model, "target"), settings).context_length
    return min(output + LEAD, limit - context)


def roomy(settings: Settings, points: Sequence[Point], output: int) -> Settings:
    """The settings with room for each of the points, and without `target.max_stall_ms`. Prompts are then read sooner,
    so that the first requests decode fewer tokens before all have begun.
    """
    tokens = max(
        point.requests * rounded_up(point.context + longest_output(settings, point.context, output), point.chunk)
        for point in points
    )
    target = {"kv_pool_tokens": tokens, "max_stall_ms": None}
    return changed(settings, max_sequences=max(point.requests for point in points), target=target)


@contextmanager
def together(settings: Settings, points: Sequence[Point], load: Workload) -> Iterator[Together]:
    """The tier actors of these settings, in a Ray of their own, warmed up as those of a server are."""
    settings = roomy(settings, points, load.output)
    requests = Requests(load_tokenizer(settings.target.model), load)
    ray.init(address="local", num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False)
    try:
        with asyncio.Runner() as runner:
            arrangement = Arrangement(settings, runner, None)
            yield Together(arrangement, settings, requests)
            arrangement.stop()
    finally:
        ray.shutdown()
