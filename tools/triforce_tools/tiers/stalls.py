"""`triforce bench stalls`: what the prompts of others do to a running stream, and what they do to a short prompt."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import ray

from actors.wire import sampling_to_proto, stats_from_proto
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import Settings
from triforce_core.errors import require
from triforce_core.kv.ranges import rounded_up
from triforce_core.messages import GREEDY, Tier
from triforce_core.models.cpu import cpu_summary
from triforce_core.models.files import load_tokenizer
from triforce_tools.bench.prompts import held_out_tokens
from triforce_tools.tiers.arrangement import Arrangement, Decoded

Report = Callable[[str], None]
STREAM_TOKENS = 1024  # prompt tokens of the running stream
SHORT_TOKENS = 200  # of the short prompt
ANSWER = 16  # output tokens of the prompts that arrive
HEAD_START_S = 1.0  # for which the stream runs alone


@dataclass(frozen=True)
class StallWorkload:
    """A running stream. While it runs, two long prompts arrive, then a short prompt."""

    context: int  # tokens of each long prompt
    output: int  # tokens of the stream


@dataclass
class Stalls:
    """One run of the load."""

    stream: Decoded
    arrived: float  # when the prompts arrived, in monotonic seconds
    others: list[Decoded] = field(default_factory=list)  # the long prompts, then the short one
    turns: int = 0  # passes of the target from the arrival to the short prompt's first text

    @property
    def longest_gap_ms(self) -> float:
        """The longest wait of the stream for its next tokens, from the arrival on."""
        moments = [moment for moment, _ in self.stream.arrivals]
        return 1e3 * max(after - before for before, after in pairwise(moments) if after > self.arrived)

    @property
    def first_text_ms(self) -> float:
        """Milliseconds from the arrival of the prompts to the short prompt's first text."""
        return 1e3 * (self.others[-1].arrivals[0][0] - self.arrived)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second from the stream's first text to the end. All prompt and output tokens count, except the
        prompt of the stream.
        """
        every = [self.stream, *self.others]
        seconds = max(d.arrivals[-1][0] for d in every) - self.stream.arrivals[0][0]
        return (sum(d.prompt_tokens for d in self.others) + sum(len(d.tokens) for d in every)) / seconds


def bench_stalls(settings: Settings, load: StallWorkload, *, repeats: int, report: Report) -> dict[str, Any]:
    """Two pipelines, one with `target.max_stall_ms` as set and one with it off, run the load in turns."""
    max_stall_ms = settings.target.max_stall_ms
    require(max_stall_ms is not None, "target.max_stall_ms", "off", "must be a number: off is what it is compared with")
    bounded = roomy(settings, load)
    modes = {"bounded": bounded, "off": bounded.model_copy(update={"target": unbounded(bounded)})}
    load_before = os.getloadavg()[0]
    tokenizer = load_tokenizer(settings.target.model)
    prompts = [held_out_tokens(tokenizer, n, i) for i, n in enumerate((STREAM_TOKENS, *sizes(load)))]
    asked = [request(settings, prompt, load.output if i == 0 else ANSWER) for i, prompt in enumerate(prompts)]
    ray.init(address="local", num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False)
    try:
        with asyncio.Runner() as runner:
            arrangements = {name: Arrangement(mode, runner, None) for name, mode in modes.items()}
            alone: dict[str, list[Stalls]] = {name: [] for name in modes}
            runs: dict[str, list[Stalls]] = {name: [] for name in modes}
            for arrangement in arrangements.values():
                run(arrangement, asked)  # the first run shows what chunks cost
            for repeat in range(repeats):
                for name in modes if repeat % 2 == 0 else reversed(modes):
                    alone[name].append(run(arrangements[name], asked[:1]))
                    runs[name].append(run(arrangements[name], asked))
                    latest = runs[name][-1]
                    report(
                        f"{name} {repeat + 1}/{repeats}: longest gap {latest.longest_gap_ms:.0f} ms (alone"
                        f" {alone[name][-1].longest_gap_ms:.0f}), short prompt {latest.first_text_ms:.0f} ms,"
                        f" {latest.tokens_per_s:.0f} tokens/s"
                    )
            for arrangement in arrangements.values():
                arrangement.stop()
    finally:
        ray.shutdown()
    return {
        "max_stall_ms": max_stall_ms,
        "context": load.context,
        "output": load.output,
        "cpu": cpu_summary(),
        "dtype": settings.dtype,
        "micro_batches": settings.micro_batches,
        "colocate": settings.placement.colocate,
        **{name: figures(alone[name], runs[name]) for name in modes},
        "throughput_ratio": median(r.tokens_per_s for r in runs["bounded"])
        / median(r.tokens_per_s for r in runs["off"]),
        "identical": len({tuple(each.stream.tokens) for mode in (*alone.values(), *runs.values()) for each in mode})
        == 1,
        "load_average": [load_before, os.getloadavg()[0]],
    }


def roomy(settings: Settings, load: StallWorkload) -> Settings:
    """The settings with room for the load."""
    lengths = [STREAM_TOKENS + load.output, *(n + ANSWER for n in sizes(load))]
    tokens = sum(rounded_up(length, settings.retrieval.chunk) for length in lengths)
    target = settings.cold.target.model_copy(update={"kv_pool_tokens": tokens})
    return settings.model_copy(update={"max_sequences": 1 + len(sizes(load)), "target": target})


def unbounded(settings: Settings) -> Any:
    return settings.target.model_copy(update={"max_stall_ms": None})


def sizes(load: StallWorkload) -> tuple[int, int, int]:
    return load.context, load.context, SHORT_TOKENS


def request(settings: Settings, prompt: list[int], output: int) -> pb.DecodeRequest:
    return pb.DecodeRequest(
        prompt_token_ids=prompt,
        sampling=sampling_to_proto(GREEDY),
        max_tokens=output,
        lookaheads=gen.Lookaheads(values=settings.speculation.effective),
    )


def run(arrangement: Arrangement, asked: list[pb.DecodeRequest]) -> Stalls:
    """Decode the first request, and a little later all others."""
    arrangement.take_stages()
    stalls: Stalls = arrangement.wait(staggered(arrangement, asked))
    stream, needed = stalls.stream, [stalls.arrived, *(other.arrivals[0][0] for other in stalls.others)]
    rule = "is too short: the stream ended before all prompts had their first text"
    require(stream.arrivals[-1][0] > max(needed), "output", len(stream.tokens), rule)
    if stalls.others:
        first_text = stalls.others[-1].arrivals[0][0]
        passes = [stage for stage in arrangement.take_stages() if stage.tier == Tier.TARGET]
        stalls.turns = sum(stalls.arrived <= stage.stop <= first_text for stage in passes)
    return stalls


async def staggered(arrangement: Arrangement, asked: list[pb.DecodeRequest]) -> Stalls:
    stalls = Stalls(Decoded(), 0.0, [Decoded() for _ in asked[1:]])
    started = asyncio.Event()

    async def one(message: pb.DecodeRequest, into: Decoded) -> None:
        into.prompt_tokens = len(message.prompt_token_ids)
        async for event in arrangement.pipeline.decode(message):
            into.arrivals.append((time.monotonic(), len(event.token_ids)))
            into.tokens += event.token_ids
            into.stats.append(stats_from_proto(event.stats))
            started.set()

    async def neighbours() -> None:
        await started.wait()
        await asyncio.sleep(HEAD_START_S)
        stalls.arrived = time.monotonic()
        await asyncio.gather(*map(one, asked[1:], stalls.others))

    await asyncio.gather(one(asked[0], stalls.stream), neighbours())
    return stalls


def figures(alone: list[Stalls], runs: list[Stalls]) -> dict[str, Any]:
    """Medians over the runs."""
    return {
        "longest_gap_ms": median(r.longest_gap_ms for r in runs),
        "longest_gap_alone_ms": median(r.longest_gap_ms for r in alone),
        "short_prompt_first_text_ms": median(r.first_text_ms for r in runs),
        "short_prompt_turns": median(r.turns for r in runs),
        "tokens_per_s": median(r.tokens_per_s for r in runs),
    }
