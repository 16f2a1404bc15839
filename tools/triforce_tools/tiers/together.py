"""Requests decoded together in tier actors: for `triforce bench pipeline`, and for the axis concurrency of a sweep.

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
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util import remove_placement_group

from actors.pipeline import Pipeline
from actors.placement import place_tiers, reserve
from actors.warm_up import warm_up
from actors.wire import request_to_proto, stats_from_proto
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import Settings
from triforce_core.engine.limits import target_limits
from triforce_core.engine.sequence import Stats
from triforce_core.errors import require
from triforce_core.kv.ranges import rounded_up
from triforce_core.models.files import load_config, load_tokenizer
from triforce_tools.bench.axes import Mode, Point, changed
from triforce_tools.bench.pairs import Measured, pooled
from triforce_tools.bench.sweep import Requests, Workload

LEAD = 1024  # tokens that a request may decode while the prompts of others are read


@dataclass
class Decoded:
    """One request as its client saw it."""

    tokens: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # monotonic seconds, tokens
    stats: Stats = field(default_factory=Stats)  # as told last


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


@dataclass(frozen=True)
class Run:
    """Some requests decoded together. All of them were decoding from `begin` to `end`, in monotonic seconds."""

    started: float
    decoded: list[Decoded]

    @property
    def begin(self) -> float:
        return max(each.arrivals[0][0] for each in self.decoded)

    @property
    def end(self) -> float:
        return min(each.arrivals[-1][0] for each in self.decoded)

    @property
    def num_tokens(self) -> int:
        """Tokens decoded between `begin` and `end`."""
        return sum(n for each in self.decoded for moment, n in each.arrivals if self.begin < moment <= self.end)

    def measured(self, output: int) -> Measured:
        """Raises `InvalidValueError` if the requests never decoded together."""
        rule = f"is too short for {len(self.decoded)} requests: the first ended before the last had begun"
        require(self.end > self.begin and self.num_tokens > 0, "output", output, rule)
        stats = pooled(each.stats for each in self.decoded)
        ms_per_token = 1e3 * (self.end - self.begin) / self.num_tokens
        return Measured(ms_per_token, self.begin - self.started, [each.tokens for each in self.decoded], stats)


class Together:
    """Three tier actors of their own, warmed up as those of a server are, which live until `stop`."""

    def __init__(self, settings: Settings, requests: Requests, runner: asyncio.Runner) -> None:
        self.settings, self.requests, self.runner = settings, requests, runner
        self.group = reserve(settings)
        self.actors = place_tiers(settings, self.group)
        self.pipeline = Pipeline(self.actors)
        runner.run(self.pipeline.connect())
        runner.run(warm_up(self.pipeline, settings))

    @property
    def about(self) -> dict[str, Any]:
        return {"micro_batches": self.settings.micro_batches, "colocate": self.settings.placement.colocate}

    def run(self, point: Point, mode: Mode, output: int) -> Measured:
        return self.decode(point, mode, output).measured(output)

    def decode(self, point: Point, mode: Mode, output: int) -> Run:
        """Decode the point's requests until they have decoded `output` tokens each, on average, since the last of them
        had its first.
        """
        longest = longest_output(self.settings, point.context, output)
        messages = [request_to_proto(request) for request in self.requests.at(point, mode, longest)]
        run = Run(time.monotonic(), [Decoded() for _ in messages])
        self.runner.run(self._decode(messages, run.decoded, Window(len(messages), output * len(messages))))
        return run

    async def _decode(self, messages: list[pb.DecodeRequest], decoded: list[Decoded], window: Window) -> None:
        async def one(message: pb.DecodeRequest, into: Decoded) -> None:
            message.stats_in_each = True
            async with aclosing(self.pipeline.decode(message)) as events:
                async for event in events:
                    window.take(into, len(event.token_ids))
                    into.arrivals.append((time.monotonic(), len(event.token_ids)))
                    into.tokens += event.token_ids
                    into.stats = stats_from_proto(event.stats)
                    if window.closed:
                        return
            window.closed = True  # one request has ended

        await asyncio.gather(*map(one, messages, decoded))

    def stop(self) -> None:
        self.runner.run(self.pipeline.stop())
        remove_placement_group(self.group)


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
def arranged(schedules: Sequence[Settings], points: Sequence[Point], load: Workload) -> Iterator[list[Together]]:
    """Tier actors with room for the points, once for each of the schedules, which have one target; in a Ray of their
    own.
    """
    requests = Requests(load_tokenizer(schedules[0].target.model), load)
    ray.init(address="local", num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False)
    try:
        with asyncio.Runner() as runner:
            made = [Together(roomy(each, points, load.output), requests, runner) for each in schedules]
            yield made
            for each in made:
                each.stop()
    finally:
        ray.shutdown()


@contextmanager
def together(settings: Settings, points: Sequence[Point], load: Workload) -> Iterator[Together]:
    """The tier actors of these settings, for a sweep."""
    with arranged([settings], points, load) as [made]:
        yield made
