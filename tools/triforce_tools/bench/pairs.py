"""Figures of modes that took turns at one point: each run is compared with the plain run of the same turn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from triforce_core.engine.sequence import Stats
from triforce_core.plans import PLAIN

Steps = dict[str, tuple[int, float]]  # forward passes and their seconds, by tier


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one mode: one request, or several that were decoded together."""

    ms_per_token: float  # of all its requests together: with several, they share each millisecond
    prefill_s: float  # until the last request had its first token
    tokens: list[list[int]]  # of each request
    stats: Stats  # summed over the requests
    steps: Steps = field(default_factory=dict)  # after the prefill; none where tiers are in other processes


Runs = dict[str, list[Measured]]  # by mode, "plain" first; the same number of each, in the order of the turns


def pooled(stats: Iterable[Stats]) -> Stats:
    """The sum of the counts; times are left at 0."""
    total = Stats()
    for each in stats:
        total.decoded += each.decoded
        total.plans = dict(Counter(total.plans) + Counter(each.plans))
        total.tallies = [a + b for a, b in zip(total.tallies, each.tallies, strict=True)]
        total.direct += each.direct
    return total


def ratios(base: Sequence[Measured], other: Sequence[Measured]) -> list[float]:
    """How many times as fast `other` was as `base`, turn by turn."""
    return [b.ms_per_token / o.ms_per_token for b, o in zip(base, other, strict=True)]


def spread(runs: Sequence[Measured]) -> float:
    """(max - min) / median of the times: how much of a difference is noise."""
    times = [run.ms_per_token for run in runs]
    return (max(times) - min(times)) / median(times)


def identical_share(runs: Sequence[Measured], reference: Measured) -> float:
    """The share of the outputs that are the reference's, as far as both go: requests that are decoded together are not
    all decoded to the same length.
    """
    same = [
        all(a == b for a, b in zip(mine, theirs, strict=False))
        for run in runs
        for mine, theirs in zip(run.tokens, reference.tokens, strict=True)
    ]
    return sum(same) / len(same)


def speculative_rounds(stats: Stats) -> int:
    """Rounds in which something was to be drafted."""
    return sum(rounds for kind, rounds in stats.plans.items() if kind != PLAIN.kind)


def speculative_share(stats: Stats) -> float:
    """The share of the target's rounds whose plan was not plain decoding."""
    return speculative_rounds(stats) / stats.tallies[0].rounds if stats.tallies[0].rounds else 0.0


def figures_of(runs: Runs) -> dict[str, Any]:
    """The figures of each mode, and how the controller compares with the best fixed plan."""
    plain = runs["plain"]
    modes: dict[str, dict[str, Any]] = {name: mode_figures(mode, plain) for name, mode in runs.items()}
    modes["plain"]["spread"] = spread(plain)
    return {"modes": modes} | against_best(runs)


def mode_figures(runs: Sequence[Measured], plain: Sequence[Measured]) -> dict[str, Any]:
    stats, against_plain = pooled(run.stats for run in runs), ratios(plain, runs)
    same = identical_share(runs, plain[0])
    ms_per_token = median(run.ms_per_token for run in runs)
    return {
        "ms_per_token": ms_per_token,
        "tokens_per_s": 1e3 / ms_per_token,
        "prefill_s": median(run.prefill_s for run in runs),
        "step_ms": {tier: step_ms(runs, tier) for tier in runs[0].steps},
        "speedup": median(against_plain),
        "speedup_min": min(against_plain),
        "speedup_max": max(against_plain),
        "tokens_per_round": stats.tokens_per_round,
        "acceptance": stats.acceptance,
        "speculative_share": speculative_share(stats),
        "identical": same == 1,
        "identical_share": same,
    }


def step_ms(runs: Sequence[Measured], tier: str) -> float | None:
    """Mean milliseconds of a tier's pass; None where it made none."""
    passes, seconds = (sum(values) for values in zip(*(run.steps[tier] for run in runs), strict=True))
    return 1e3 * seconds / passes if passes else None


def against_best(runs: Runs) -> dict[str, Any]:
    """The fixed plan with the highest median speed-up, plain decoding included, and the speed of the controller
    relative to that plan's. Both are None where no plan but plain was measured.
    """
    fixed = [name for name in runs if name != "auto"]
    if len(fixed) == 1:
        return {"best_plan": None, "auto_over_best": None}
    best = max(fixed, key=lambda name: median(ratios(runs["plain"], runs[name])))
    return {"best_plan": best, "auto_over_best": median(ratios(runs[best], runs["auto"]))}


def summary_of(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means over the points: of each mode's speed-up, over the points that have the mode, and of the
    controller's ratio to the best fixed plan. `points` are figures as `figures_of` returns them.
    """
    names = dict.fromkeys(name for point in points for name in point["modes"] if name != "plain")
    compared = [point["auto_over_best"] for point in points if point["auto_over_best"] is not None]
    return {
        "speedup": {
            name: geometric_mean([point["modes"][name]["speedup"] for point in points if name in point["modes"]])
            for name in names
        },
        "auto_over_best": geometric_mean(compared) if compared else None,
    }


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
