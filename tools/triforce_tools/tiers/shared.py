"""`triforce bench shared`: several questions on one document, against the same questions on documents of their own.

Documents that nobody shares are the same text under salts of their own: equally long, and equally hard to draft.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import ray

from actors.wire import sampling_to_proto, stats_from_proto
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import Settings
from triforce_core.messages import SamplingParams, Tally
from triforce_core.models.cpu import cpu_summary
from triforce_core.models.files import load_tokenizer
from triforce_tools.bench.prompts import held_out_tokens
from triforce_tools.tiers.arrangement import Arrangement, Decoded, Run

Report = Callable[[str], None]
QUESTION = 32  # tokens that follow the document, different in each request
POLL_S = 0.1  # between two readings of the KV in use


@dataclass(frozen=True)
class SharedWorkload:
    context: int  # tokens of the document
    questions: int
    output: int  # tokens of each answer
    sampling: SamplingParams


@dataclass
class Asked:
    """Some requests that were sent together."""

    decoded: list[Decoded]
    sent: float  # monotonic seconds
    kv_tokens: int = 0  # most slots of the target's pool in use at once

    @property
    def first_text_s(self) -> list[float]:
        return [each.arrivals[0][0] - self.sent for each in self.decoded]

    @property
    def tokens(self) -> list[list[int]]:
        return [each.tokens for each in self.decoded]

    @property
    def cached(self) -> list[int]:
        return [each.stats[-1].cached_tokens for each in self.decoded]

    @property
    def tokens_per_s(self) -> float:
        return Run(self.decoded, [], 0).tokens_per_s


def bench_shared(settings: Settings, load: SharedWorkload, *, repeats: int, report: Report) -> dict[str, Any]:
    """The figures of the whole load; medians over `repeats` runs of it in one pipeline."""
    settings = roomy(settings, load)
    load_before = os.getloadavg()[0]
    tokenizer = load_tokenizer(settings.target.model)
    document = held_out_tokens(tokenizer, load.context)
    prompts = [document + held_out_tokens(tokenizer, QUESTION, i + 1) for i in range(load.questions)]
    ray.init(address="local", num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False)
    try:
        with asyncio.Runner() as runner:
            arrangement = Arrangement(settings, runner, None)
            runs = []
            for repeat in range(repeats):
                runs.append(one_run(arrangement, settings, load, prompts, f"{repeat}"))
                report(f"{repeat + 1} of {repeats}: {runs[-1]}")
            arrangement.stop()
    finally:
        ray.shutdown()
    return {
        "context": load.context,
        "questions": load.questions,
        "output": load.output,
        "temperature": load.sampling.temperature,
        "cpu": cpu_summary(),
        "dtype": settings.dtype,
        "runs": runs,
        **{name: median(run[name] for run in runs) for name in runs[0]},
        "load_average": [load_before, os.getloadavg()[0]],
    }


def roomy(settings: Settings, load: SharedWorkload) -> Settings:
    """The settings with room for all questions on documents of their own."""
    tokens = (load.questions + 1) * (load.context + QUESTION + load.output + 512)
    target = settings.target.model_copy(update={"kv_pool_tokens": tokens})
    return settings.model_copy(update={"max_sequences": load.questions, "target": target})


def one_run(
    arrangement: Arrangement, settings: Settings, load: SharedWorkload, prompts: list[list[int]], run: str
) -> dict[str, float]:
    """The figures of one run. Every salt begins with `run`, so that no run finds the KV of another."""

    def ask(salts: Sequence[str], which: range, lookaheads: tuple[int, ...] | None) -> Asked:
        requests = [
            request(load, prompts[i], f"{run}/{salt}", lookaheads) for i, salt in zip(which, salts, strict=True)
        ]
        asked: Asked = arrangement.wait(decode(arrangement, requests))
        return asked

    n, drafting = load.questions, settings.speculation.effective
    every, own = range(n), [f"own {i}" for i in range(n)]
    cold = [ask(own[i : i + 1], range(i, i + 1), drafting) for i in every]
    one_by_one = [ask(["one by one"], range(i, i + 1), drafting) for i in every]
    first = ask(["first before"], range(1), drafting)
    rest = ask(["first before"] * (n - 1), range(1, n), drafting)
    together = ask(["at once"] * n, every, drafting)
    cold_first_text = median(asked.first_text_s[0] for asked in cold)
    warm_first_text = median(asked.first_text_s[0] for asked in one_by_one[1:])
    cold_tokens = [asked.tokens[0] for asked in cold]
    given = len(prompts[0])
    shared, apart = ["at once"] * n, [f"apart {i}" for i in every]
    ask(apart, every, (0, 0))  # from here on no document is read, so that all answers are decoded together
    speeds = {}
    for name, lookaheads in (("plain", (0, 0)), ("speculating", None)):
        speeds[name] = [ask(salts, every, lookaheads).tokens_per_s for salts in (shared, apart)]
    return {
        "first_text_cold_s": cold_first_text,
        "first_text_warm_s": warm_first_text,
        "first_text_ratio": cold_first_text / warm_first_text,
        "first_text_warm_together_s": median(rest.first_text_s),
        "first_text_warm_together_longest_s": max(rest.first_text_s),
        "kv_ratio": max(rest.kv_tokens, together.kv_tokens) / cold[0].kv_tokens,
        "prefilled_at_once": sum(given - cached for cached in together.cached) / given,
        "acceptance_cold": acceptance([asked.decoded[0] for asked in cold]),
        "acceptance_warm": acceptance([*rest.decoded, *together.decoded]),
        "equal_to_cold": equal([asked.tokens[0] for asked in one_by_one], cold_tokens),
        "equal_together": equal([*first.tokens, *rest.tokens], cold_tokens),
        "equal_at_once": equal(together.tokens, cold_tokens),
        **{f"{name}_tokens_per_s": shared for name, (shared, _) in speeds.items()},
        **{f"{name}_over_apart": shared / apart for name, (shared, apart) in speeds.items()},
    }


def equal(answers: list[list[int]], others: list[list[int]]) -> float:
    """The share of answers that are the same."""
    return sum(one == other for one, other in zip(answers, others, strict=True)) / len(others)


def acceptance(decoded: list[Decoded]) -> float:
    """The share of the tokens proposed to the target that it accepted."""
    tally = sum((each.stats[-1].tallies[0] for each in decoded), Tally())
    return tally.accepted / max(1, tally.proposed)  # nothing is proposed where `tiers: target`


def request(load: SharedWorkload, prompt: list[int], salt: str, lookaheads: tuple[int, ...] | None) -> pb.DecodeRequest:
    return pb.DecodeRequest(
        prompt_token_ids=prompt,
        sampling=sampling_to_proto(load.sampling),
        max_tokens=load.output,
        cache_salt=salt,
        lookaheads=None if lookaheads is None else gen.Lookaheads(values=lookaheads),
    )


async def decode(arrangement: Arrangement, requests: list[pb.DecodeRequest]) -> Asked:
    asked = Asked([Decoded() for _ in requests], time.monotonic())

    async def one(message: pb.DecodeRequest, into: Decoded) -> None:
        async for event in arrangement.pipeline.decode(message):
            into.arrivals.append((time.monotonic(), len(event.token_ids)))
            into.tokens += event.token_ids
            into.stats.append(stats_from_proto(event.stats))

    async def watch() -> None:
        while True:
            target = (await arrangement.pipeline.status())[-1]
            asked.kv_tokens = max(asked.kv_tokens, target.kv_tokens)
            await asyncio.sleep(POLL_S)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*map(one, requests, asked.decoded))
    watching.cancel()
    return asked
