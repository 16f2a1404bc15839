"""Single-stage times for `triforce simulate`: the times of each tier alone, corrected to those in its actor.

Alone, in one process with warm caches and nothing to send, a pass is shorter than in an actor, where other threads of
the process move messages and snapshots at the same time. How much longer a pass takes in an actor, and how much time
lies between one tier's pass and the next tier's, is measured in runs in sequential mode, where no stages overlap.
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

Gaps = dict[tuple[Tier, Tier], float]  # mean ms from the end of the first tier's pass to the start of the second's


def calibration(
    alone: dict[str, list[dict[str, Any]]], sequential: Iterable[list[Stage]], hop_ms: float, *, shared_core: bool
) -> dict[str, Any]:
    """The entries `stages` and `hop_ms` of a scenario.

    alone: `{tier: [{batch, tokens, ms}, …]}`, the passes of each tier alone. sequential: the stages of each run in
    sequential mode. hop_ms: milliseconds of a message one way between idle actors, used for links that no run has
    crossed. shared_core: draft and retrieval share one core, which also moves the messages between them, so that these
    messages count as part of the draft step.
    """
    runs = [sorted(stages, key=lambda stage: stage.start) for stages in sequential]
    gaps = mean_gaps(runs)
    up = gaps.get((Tier.RETRIEVAL, Tier.TARGET), hop_ms)
    inner = [gaps[link] for link in ((Tier.RETRIEVAL, Tier.DRAFT), (Tier.DRAFT, Tier.RETRIEVAL)) if link in gaps]
    between = mean(inner) if inner else hop_ms
    # `after` is the target's time between a pass and the next message: it commits tokens and cuts snapshots.
    if (Tier.TARGET, Tier.DRAFT) in gaps:  # the retrieval tier passes the work on without a pass
        after = gaps[Tier.TARGET, Tier.DRAFT] - up - between
    elif (Tier.TARGET, Tier.RETRIEVAL) in gaps:
        after = gaps[Tier.TARGET, Tier.RETRIEVAL] - up
    else:
        after = gaps.get((Tier.TARGET, Tier.TARGET), 0.0)
    steps = steps_in_turn(runs)
    more = {Tier.TARGET: max(0.0, after), Tier.DRAFT: gaps.get((Tier.DRAFT, Tier.DRAFT), 0.0) * (1 - 1 / steps)}
    if shared_core:
        more[Tier.DRAFT] += 2 * between / steps
    points = Stages.model_validate(alone)
    stages = {}
    for tier in Tier:
        taken = [stage for run in runs for stage in run if stage.tier == tier]
        factor, batch = longer(StageTimes(points.of(tier)), taken), mean(s.batch for s in taken) if taken else 1
        stages[tier.name.lower()] = [
            {**point, "ms": factor * point["ms"] + more.get(tier, 0.0) * share}
            for point, share in with_shares(alone[tier.name.lower()], batch)
        ]
    return {
        "stages": stages,
        "hop_ms": {"target_retrieval": up, "retrieval_draft": 0.0 if shared_core else between},
    }


def with_shares(points: list[dict[str, Any]], batch: float) -> list[tuple[dict[str, Any], float]]:
    """Each point of a table, with its batch size divided by `batch`, or with 1 if the table has only one point."""
    return [(point, point["batch"] / batch if len(points) > 1 else 1.0) for point in points]


def mean_gaps(runs: Iterable[list[Stage]]) -> Gaps:
    """The mean gap between consecutive passes, by their tiers."""
    found: dict[tuple[Tier, Tier], list[float]] = defaultdict(list)
    for run in runs:
        for one, other in pairwise(run):
            found[one.tier, other.tier].append(1e3 * (other.start - one.stop))
    return {link: mean(gaps) for link, gaps in found.items()}


def steps_in_turn(runs: Iterable[list[Stage]]) -> float:
    """Mean number of draft steps per inner round; 1 if there are no inner rounds."""
    pairs = [(one.tier, other.tier) for run in runs for one, other in pairwise(run)]
    rounds = pairs.count((Tier.DRAFT, Tier.RETRIEVAL))
    return 1 + pairs.count((Tier.DRAFT, Tier.DRAFT)) / rounds if rounds else 1.0


def longer(times: StageTimes, stages: list[Stage]) -> float:
    """The time that these stages took, divided by the time of the same stages alone; 1 if there are none."""
    if not stages:
        return 1.0
    alone = sum(times.ms(stage.batch, stage.tokens / stage.batch, 0.0) for stage in stages)
    return 1e3 * sum(stage.stop - stage.start for stage in stages) / alone
