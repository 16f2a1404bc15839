"""`triforce bench pipeline`: compares tiers that take turns with tiers that all work at once, in real actors."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import ray

from triforce_core.config import COLOCATED, Settings
from triforce_core.errors import require
from triforce_core.machine.cores import keep_awake
from triforce_core.machine.cpu import cpu_summary
from triforce_core.messages import Drafting, Tier
from triforce_core.plans import Plan
from triforce_tools.bench.axes import Mode, Point
from triforce_tools.bench.pairs import Measured, identical_share, ratios, spread
from triforce_tools.bench.sweep import WARM_UP_TOKENS, Workload
from triforce_tools.tiers.bound import Rounds
from triforce_tools.tiers.stages import Stage, record, taken_from
from triforce_tools.tiers.together import Together, arranged

MODES = ("sequential", "pipelined")


@dataclass(frozen=True)
class Timed:
    """A run, and the stages of its tiers while all requests were decoding."""

    measured: Measured
    stages: list[Stage]
    seconds: float

    def stage_ms(self, tier: Tier) -> float:
        """Mean milliseconds of a pass, or of a step in the draft tier; 0 if there was none."""
        return 1e3 * self._mean(tier, lambda stage: stage.stop - stage.start)

    def core_ms(self, tier: Tier) -> float:
        """Mean milliseconds for which the tier's thread had a core during a pass or step; 0 if there was none."""
        return 1e3 * self._mean(tier, lambda stage: stage.cpu)

    def mean_batch(self, tier: Tier) -> float:
        return self._mean(tier, lambda stage: stage.batch)

    def busy_share(self, tier: Tier) -> float:
        return sum(stage.stop - stage.start for stage in self.stages if stage.tier == tier) / self.seconds

    def _mean(self, tier: Tier, of: Callable[[Stage], float]) -> float:
        return mean([of(stage) for stage in self.stages if stage.tier == tier] or [0.0])


def bench_pipeline(
    settings: Settings, point: Point, load: Workload, report: Callable[[str], None]
) -> tuple[dict[str, Any], list[Stage]]:
    """Returns the figures, and the stages of the last pipelined run for a trace."""
    for tier in ("target", "retrieval"):
        ranks = settings.ranks((tier,))
        require(ranks == 1, f"{tier}.tensor_parallel", ranks, "must be 1: stages are measured one process each")
    load_before = os.getloadavg()[0]
    with keep_awake(settings.placement.cpu_latency_us) or nullcontext():  # refused here, before actors do the same
        pass
    plan = Mode("fixed", Plan(*settings.speculation.effective, Drafting.MODEL))
    runs: dict[str, list[Timed]] = {name: [] for name in MODES}
    schedules = [scheduled(settings, micro_batches=1), scheduled(settings, run_ahead=point.requests == 1)]
    with arranged(schedules, [point], load) as made:
        for each in made:
            each.run(point, plan, WARM_UP_TOKENS)
            ray.get([actor.__ray_call__.remote(record) for actor in each.actors.each()])
        turns = list(zip(MODES, made, strict=True))
        for repeat in range(load.repeats):
            for name, each in turns if repeat % 2 == 0 else reversed(turns):
                runs[name].append(timed(each, point, plan, load.output))
                speed = 1e3 / runs[name][-1].measured.ms_per_token
                report(f"{name} {repeat + 1}/{load.repeats}: {speed:.1f} tokens/s")
    figures = {
        "requests": point.requests,
        "context": point.context,
        "output": load.output,
        "temperature": point.temperature,
        "lookaheads": list(settings.speculation.effective),
        "micro_batches": settings.micro_batches,
        "budget": settings.retrieval.budget,
        "cpu": cpu_summary(),
        "dtype": settings.dtype,
        "colocate": settings.placement.colocate,
        "cores": {tier.name.lower(): cores_of(settings, tier) for tier in Tier},
        "cpu_latency_us": settings.placement.cpu_latency_us,
        **compared(settings, point.requests, runs["sequential"], runs["pipelined"]),
        "load_average": [load_before, os.getloadavg()[0]],
    }
    return figures, runs["pipelined"][-1].stages


def scheduled(settings: Settings, **changes: Any) -> Settings:
    return settings.model_copy(update={"speculation": settings.speculation.model_copy(update=changes)})


def timed(bench: Together, point: Point, plan: Mode, output: int) -> Timed:
    actors = bench.actors.each()
    taken_from(actors)
    run = bench.decode(point, plan, output)
    measured = run.measured(output)
    stages = [s for s in taken_from(actors) if run.begin <= s.start and s.stop <= run.end]
    return Timed(measured, stages, run.end - run.begin)


def cores_of(settings: Settings, tier: Tier) -> list[int] | None:
    cores = getattr(settings.placement, tier.name.lower()).cores
    return None if cores is None else list(cores)


def shares_a_core(settings: Settings) -> bool:
    """Whether draft and retrieval share a process or their cores, and so are one stage."""
    draft = cores_of(settings, Tier.DRAFT)
    together = draft is not None and draft == cores_of(settings, Tier.RETRIEVAL)
    return len(settings.placement.groups) < len(COLOCATED["none"]) or together


def compared(
    settings: Settings, requests: int, sequential: Sequence[Timed], pipelined: Sequence[Timed]
) -> dict[str, Any]:
    """Figures of the modes: medians over runs. The bound is computed from the stages of the median pipelined run."""
    turns, ahead = ([run.measured for run in runs] for runs in (sequential, pipelined))
    middle = median(run.ms_per_token for run in ahead)
    typical = min(pipelined, key=lambda run: abs(run.measured.ms_per_token - middle))
    stats = typical.measured.stats
    rounds, lookahead = rounds_of(typical, settings), settings.speculation.effective[0]
    alone = requests == 1
    bound = rounds.run_ahead_bound(lookahead) if alone else rounds.bound(requests, shares_a_core(settings))
    return {
        "sequential_tokens_per_s": median(1e3 / run.ms_per_token for run in turns),
        "pipelined_tokens_per_s": median(1e3 / run.ms_per_token for run in ahead),
        "speedup": median(ratios(turns, ahead)),
        "noise": spread(turns),
        "bound_tokens_per_s": bound,
        "share_of_bound": 1e3 / typical.measured.ms_per_token / bound,
        "identical": identical_share([*turns, *ahead], turns[0]) == 1,
        "stage_ms": {tier.name.lower(): typical.stage_ms(tier) for tier in Tier},
        "mean_batch": {tier.name.lower(): typical.mean_batch(tier) for tier in Tier},
        "busy_share": {tier.name.lower(): typical.busy_share(tier) for tier in Tier},
        "sequential_stage_ms": {tier.name.lower(): sequential[-1].stage_ms(tier) for tier in Tier},
        "acceptance": stats.acceptance,
        "tokens_per_round": stats.tokens_per_round,
    }


def rounds_of(run: Timed, settings: Settings) -> Rounds:
    target, retrieval, _ = run.measured.stats.tallies
    draft_ms, retrieval_ms, target_ms = (run.stage_ms(tier) for tier in Tier)
    steps = settings.speculation.effective[1]
    return Rounds(
        tokens=(target.accepted + target.rounds) / target.rounds,
        inner=retrieval.rounds / target.rounds,
        acceptance=target.acceptance or 0.0,
        draft=steps * draft_ms / 1e3,
        retrieval=retrieval_ms / 1e3,
        shared=(steps * run.core_ms(Tier.DRAFT) + run.core_ms(Tier.RETRIEVAL)) / 1e3,
        target=target_ms / 1e3,
        batches=(run.mean_batch(Tier.DRAFT), run.mean_batch(Tier.RETRIEVAL), run.mean_batch(Tier.TARGET)),
    )
