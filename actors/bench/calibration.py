"""Single-stage times for `triforce simulate`: those of each tier by itself, as they are in its actor.

By itself, in one process with warm caches and nothing to send, a pass is shorter than in an actor, where threads of its
process move messages and snapshots beside it. How much longer it is there, and what lies between one tier's pass and
the next one's, is read off runs in sequential mode, where one stage follows another and none overlaps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from statistics import mean
from typing import Any

from triforce_core.messages import Tier
from triforce_core.simulate.scenario import Stages
from triforce_core.simulate.stage_times import StageTimes
from triforce_core.timeline import Stage

Gaps = dict[tuple[Tier, Tier], float]  # mean ms from the end of a pass of one tier to the beginning of another's


def calibration(
    alone: dict[str, list[dict[str, Any]]], sequential: Iterable[list[Stage]], hop_ms: float, *, shared_core: bool
) -> dict[str, Any]:
    """`stages` and `hop_ms` of a scenario.

    alone: `{tier: [{batch, tokens, ms}, …]}` of each tier by itself. sequential: the stages of each run in that mode.
    hop_ms: a message one way between idle actors, for links that no run has crossed. With `shared_core` draft and
    retrieval are processes on one core: messages between them are work of it, and count as part of the draft step.
    """
    runs = [sorted(stages, key=lambda stage: stage.start) for stages in sequential]
    gaps = mean_gaps(runs)
    up = gaps.get((Tier.RETRIEVAL, Tier.TARGET), hop_ms)
    inner = [gaps[link] for link in ((Tier.RETRIEVAL, Tier.DRAFT), (Tier.DRAFT, Tier.RETRIEVAL)) if link in gaps]
    between = mean(inner) if inner else hop_ms
    down = gaps.get((Tier.TARGET, Tier.DRAFT), up + between)  # the retrieval tier passes it on
    # What the target does after a pass, before anybody hears of it: it commits tokens, and cuts snapshots.
    more = {Tier.TARGET: max(0.0, down - up - between)}
    if shared_core:
        more[Tier.DRAFT] = 2 * between / steps_in_turn(runs)
    points = Stages.model_validate(alone)
    stages = {}
    for tier in Tier:
        taken = [stage for run in runs for stage in run if stage.tier == tier]
        factor, batch = longer(StageTimes(points.of(tier)), taken), mean(s.batch for s in taken) if taken else 1
        stages[tier.name.lower()] = [
            {**point, "ms": factor * point["ms"] + more.get(tier, 0.0) * point["batch"] / batch}
            for point in alone[tier.name.lower()]
        ]
    return {
        "stages": stages,
        "hop_ms": {"target_retrieval": up, "retrieval_draft": 0.0 if shared_core else between},
    }


def mean_gaps(runs: Iterable[list[Stage]]) -> Gaps:
    """Between the passes of different tiers that follow one another."""
    found: dict[tuple[Tier, Tier], list[float]] = defaultdict(list)
    for run in runs:
        for one, other in pairwise(run):
            if one.tier != other.tier:
                found[one.tier, other.tier].append(1e3 * (other.start - one.stop))
    return {link: mean(gaps) for link, gaps in found.items()}


def steps_in_turn(runs: Iterable[list[Stage]]) -> float:
    """Draft steps of an inner round, on average."""
    rounds = [[stage.tier for stage in run] for run in runs]
    steps = sum(tiers.count(Tier.DRAFT) for tiers in rounds)
    return steps / max(1, sum(pair == (Tier.DRAFT, Tier.RETRIEVAL) for tiers in rounds for pair in pairwise(tiers)))


def longer(times: StageTimes, stages: list[Stage]) -> float:
    """How many times as long these took as the same ones by themselves; 1 where there are none."""
    if not stages:
        return 1.0
    alone = sum(times.ms(stage.batch, stage.tokens / stage.batch, 0.0) for stage in stages)
    return 1e3 * sum(stage.stop - stage.start for stage in stages) / alone
