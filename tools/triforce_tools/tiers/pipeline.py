"""`triforce bench pipeline`: compares tiers that take turns with tiers that all work at once, in real actors."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import ray

from actors.cores import keep_awake
from actors.wire import sampling_to_proto, seed_to_proto
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import Settings
from triforce_core.engine.scheduler import STEP_AHEAD
from triforce_core.errors import require
from triforce_core.kv.ranges import rounded_up
from triforce_core.messages import SamplingParams, Tier
from triforce_core.models.cpu import cpu_summary
from triforce_core.models.files import load_tokenizer
from triforce_tools.bench.prompts import HELD_OUT, held_out_tokens
from triforce_tools.tiers.arrangement import Arrangement, Run
from triforce_tools.tiers.paced import VOCAB_SIZE, Pace

Report = Callable[[str], None]


@dataclass(frozen=True)
class PipelineWorkload:
    """Requests that are decoded together."""

    requests: int
    context: int  # prompt tokens per request
    output: int  # output tokens per request
    sampling: SamplingParams
    seed: int


def bench_pipeline(
    settings: Settings, load: PipelineWorkload, *, repeats: int, pace: Pace | None, report: Report
) -> tuple[dict[str, Any], Run]:
    """Returns the figures, and the last pipelined run for its trace."""
    placement = settings.placement
    if pace is not None:
        require(placement.colocate == "none", "placement.colocate", placement.colocate, "must be none for paced tiers")
    for tier in ("target", "retrieval"):
        ranks = settings.ranks((tier,))
        require(ranks == 1, f"{tier}.tensor_parallel", ranks, "must be 1: stages are measured one process each")
    require(load.output >= 16, "output", load.output, "must be at least 16 tokens, to measure between them")
    load_before = os.getloadavg()[0]
    messages = decode_requests(settings, load, pace)
    with keep_awake(placement.cpu_latency_us) or nullcontext():  # refused here, before actors start, which do the same
        pass
    modes: dict[str, dict[str, Any]] = {
        "sequential": {"micro_batches": 1},
        "pipelined": {"run_ahead": load.requests == 1},
    }
    if load.requests > 1:
        modes["pipelined, run-ahead on"] = {"run_ahead": True}
    ray.init(address="local", num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False)
    try:
        with asyncio.Runner() as runner:
            arrangements = {
                name: Arrangement(scheduled(settings, load, **changes), runner, pace) for name, changes in modes.items()
            }
            for arrangement in arrangements.values():
                arrangement.run([shortened(message) for message in messages])  # warm-up, which keeps the prompts' KV
            runs: dict[str, list[Run]] = {name: [] for name in modes}
            for repeat in range(repeats):
                for name in modes if repeat % 2 == 0 else reversed(modes):
                    run = arrangements[name].run(messages)
                    together = run.begin < run.end
                    require(together, "output", load.output, "must be more: the requests never decoded together")
                    runs[name].append(run)
                    report(f"{name} {repeat + 1}/{repeats}: {run.tokens_per_s:.1f} tokens/s")
            hop_ms = arrangements["pipelined"].hop_ms()  # measured last, because pings leave the tiers some 5% slower
            for arrangement in arrangements.values():
                arrangement.stop()
    finally:
        ray.shutdown()
    figures = {
        **conditions(settings, load, pace),
        **compared(settings, load, runs, hop_ms),
        "load_average": [load_before, os.getloadavg()[0]],
    }
    return figures, runs["pipelined"][-1]


def scheduled(settings: Settings, load: PipelineWorkload, **changes: Any) -> Settings:
    """The settings with room for the load, and with these changes of the schedule.

    The prefix cache is on: prompts are read one after another, so that without the KV which the warm-up keeps, the
    first request could end before the last one begins to decode.
    """
    grown = 2 * (load.output + STEP_AHEAD)  # growth doubles; without room for it, a prompt's KV would be given up
    each = rounded_up(load.context + grown, settings.retrieval.chunk)
    return settings.model_copy(
        update={
            "max_sequences": load.requests,
            "target": settings.target.model_copy(update={"kv_pool_tokens": load.requests * each, "prefix_cache": True}),
            "speculation": settings.speculation.model_copy(update=changes),
        }
    )


def decode_requests(settings: Settings, load: PipelineWorkload, pace: Pace | None) -> list[pb.DecodeRequest]:
    """One request per prompt. Prompts begin at the held-out files in turn; for paced tiers they are arbitrary."""
    if pace is None:
        tokenizer = load_tokenizer(settings.target.model)
        prompts = [held_out_tokens(tokenizer, load.context, n % len(HELD_OUT)) for n in range(load.requests)]
    else:
        prompts = [[n % VOCAB_SIZE for n in range(load.context)]] * load.requests
    return [
        pb.DecodeRequest(
            prompt_token_ids=prompt,
            sampling=sampling_to_proto(load.sampling),
            seed=seed_to_proto(load.seed + n),
            max_tokens=load.output,
            lookaheads=gen.Lookaheads(values=settings.speculation.effective),
        )
        for n, prompt in enumerate(prompts)
    ]


def shortened(message: pb.DecodeRequest) -> pb.DecodeRequest:
    short = pb.DecodeRequest()
    short.CopyFrom(message)
    short.max_tokens = min(32, message.max_tokens)
    return short


def conditions(settings: Settings, load: PipelineWorkload, pace: Pace | None) -> dict[str, Any]:
    return {
        "paced": None if pace is None else {"ms": [pace.ms(tier) for tier in Tier], "note": "stages sleep, none runs"},
        "requests": load.requests,
        "context": load.context,
        "output": load.output,
        "temperature": load.sampling.temperature,
        "lookaheads": list(settings.speculation.effective),
        "micro_batches": settings.micro_batches,
        "budget": settings.retrieval.budget,
        "cpu": cpu_summary(),
        "dtype": settings.dtype,
        "colocate": settings.placement.colocate,
        "cores": {tier.name.lower(): cores_of(settings, tier) for tier in Tier},
        "cpu_latency_us": settings.placement.cpu_latency_us,
    }


def cores_of(settings: Settings, tier: Tier) -> list[int] | None:
    cores = getattr(settings.placement, tier.name.lower()).cores
    return None if cores is None else list(cores)


def shares_a_core(settings: Settings) -> bool:
    """Whether draft and retrieval share a process or their cores, and so are one stage."""
    draft = cores_of(settings, Tier.DRAFT)
    together = draft is not None and draft == cores_of(settings, Tier.RETRIEVAL)
    return settings.placement.colocate != "none" or together


def compared(settings: Settings, load: PipelineWorkload, runs: dict[str, list[Run]], hop_ms: float) -> dict[str, Any]:
    """Figures of the modes: medians over runs. The bound is computed from the stages of the median pipelined run."""

    def median(name: str) -> float:
        return statistics.median(run.tokens_per_s for run in runs[name])

    sequential, pipelined = runs["sequential"], runs["pipelined"]
    typical = min(pipelined, key=lambda run: abs(run.tokens_per_s - median("pipelined")))
    rounds = Rounds.of(typical, settings, hop_ms)
    bound = (
        rounds.run_ahead_bound(settings) if load.requests == 1 else rounds.bound(load.requests, shares_a_core(settings))
    )
    target, retrieval = typical.tally(0), typical.tally(1)
    every = [run for mode in runs.values() for run in mode]
    speeds = [run.tokens_per_s for run in sequential]
    figures = {
        "sequential_tokens_per_s": median("sequential"),
        "pipelined_tokens_per_s": median("pipelined"),
        "speedup": median("pipelined") / median("sequential"),
        "noise": (max(speeds) - min(speeds)) / median("sequential"),
        "bound_tokens_per_s": bound,
        "share_of_bound": typical.tokens_per_s / bound,
        "identical": all([d.tokens for d in run.decoded] == [d.tokens for d in every[0].decoded] for run in every),
        "stage_ms": {tier.name.lower(): typical.stage_ms(tier) for tier in Tier},
        "mean_batch": {tier.name.lower(): typical.mean_batch(tier) for tier in Tier},
        "busy_share": {tier.name.lower(): typical.busy_share(tier) for tier in Tier},
        "sequential_stage_ms": {tier.name.lower(): sequential[-1].stage_ms(tier) for tier in Tier},
        "acceptance": {"retrieval": target.acceptance, "draft": retrieval.acceptance},
        "tokens_per_round": (target.accepted + target.rounds) / target.rounds,
        "hop_ms_p50": hop_ms,
        "bytes_per_token": typical.link_bytes / sum(n for d in typical.decoded for _, n in d.arrivals[1:]),
    }
    if with_run_ahead := runs.get("pipelined, run-ahead on"):
        figures["pipelined_with_run_ahead_tokens_per_s"] = statistics.median(r.tokens_per_s for r in with_run_ahead)
    return figures


@dataclass(frozen=True)
class Rounds:
    """The mean times of one block on its way through the tiers, in seconds, from the stages of a run."""

    tokens: float  # E2: tokens that a target pass commits per request
    inner: float  # n: rounds of the retrieval tier per block
    acceptance: float  # α2: chance that the target accepts a token
    draft: float  # time of the draft tier per inner round
    retrieval: float  # time of the retrieval tier per inner round
    shared: float  # core time of both per inner round, if they share a core
    target: float  # t3: time of a target pass
    hop: float  # time of a round trip between two tiers
    batches: tuple[float, float, float]  # the mean batch of each tier's passes, draft first

    @classmethod
    def of(cls, run: Run, settings: Settings, hop_ms: float) -> Rounds:
        target, retrieval = run.tally(0), run.tally(1)
        draft_ms, retrieval_ms, target_ms = (run.stage_ms(tier) or 0.0 for tier in Tier)
        steps = settings.speculation.effective[1]
        shared_ms = steps * (run.core_ms(Tier.DRAFT) or 0.0) + (run.core_ms(Tier.RETRIEVAL) or 0.0)
        return cls(
            tokens=(target.accepted + target.rounds) / target.rounds,
            inner=retrieval.rounds / target.rounds,
            acceptance=target.acceptance or 0.0,
            draft=steps * draft_ms / 1e3,
            retrieval=retrieval_ms / 1e3,
            shared=shared_ms / 1e3,
            target=target_ms / 1e3,
            hop=hop_ms / 1e3,
            batches=(run.mean_batch(Tier.DRAFT), run.mean_batch(Tier.RETRIEVAL), run.mean_batch(Tier.TARGET)),
        )

    @property
    def drafting(self) -> float:
        """D: the time until a block is ready."""
        return self.inner * (self.draft + self.retrieval + self.hop)

    @property
    def latency(self) -> float:
        """L: the time until a block is drafted and verified."""
        return self.drafting + self.target + self.hop

    def bound(self, requests: int, shared: bool) -> float:
        """The bound E2·min(requests/L, min over stages of b/d) in tokens/s: no schedule of these stages is faster.

        b is the mean batch of a stage and d its time per block. With `shared`, draft and retrieval are one stage,
        because they share one core.
        """
        stages = [self.batches[2] / self.target]
        if shared:
            stages.append(self.batches[1] / (self.inner * self.shared))
        else:
            stages.append(self.batches[1] / (self.inner * self.retrieval))
            stages += [self.batches[0] / (self.inner * self.draft)] if self.draft else []
        return self.tokens * min(requests / self.latency, *stages)

    def run_ahead_bound(self, settings: Settings) -> float:
        """The bound E2 / (h·max(t3, D) + (1 − h)·L) in tokens/s for one request with run-ahead.

        h = α2^(γ2+1) is the chance that a whole block and the token after it are guessed right.
        """
        guessed = self.acceptance ** (settings.speculation.effective[0] + 1)
        return self.tokens / (guessed * max(self.target, self.drafting) + (1 - guessed) * self.latency)
