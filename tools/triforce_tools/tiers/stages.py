"""When tiers were at work: recorded inside their actors, read from outside, and written as a Chrome trace."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from torch import Tensor

from actors.tiers import TierActor
from triforce_core.errors import InvalidValueError
from triforce_core.messages import Tier

if TYPE_CHECKING:
    from triforce_core.kv.base import Batch, Forward

MAX_STAGES = 200_000  # beyond this the oldest are dropped


class Stage(NamedTuple):
    """One forward pass. Times are read from the monotonic clock, which all processes of a machine share."""

    tier: Tier
    start: float  # seconds
    stop: float
    cpu: float  # seconds of CPU time of the tier's thread; less than stop - start if it waited for a core
    batch: int  # sequences
    tokens: int  # positions at which a token is drawn, over all sequences


RECORDED: deque[Stage] = deque(maxlen=MAX_STAGES)  # in this process


def record(actor: TierActor) -> None:
    """Runs in a tier actor: from now on record the passes of all its tiers."""
    for tier, runner in actor.runners.items():
        runner.forward = recorded(tier, runner.forward)  # type: ignore[method-assign]


def recorded(tier: Tier, forward: Callable[[list[Forward]], tuple[Tensor, Batch]]) -> Callable[..., Any]:
    def timed(forwards: list[Forward]) -> tuple[Tensor, Batch]:
        start, cpu = time.monotonic(), time.thread_time()
        passed = forward(forwards)
        tokens = sum(each.num_sampled for each in forwards)
        RECORDED.append(Stage(tier, start, time.monotonic(), time.thread_time() - cpu, len(forwards), tokens))
        return passed

    return timed


def take(_: TierActor) -> list[tuple[Any, ...]]:
    """Runs in a tier actor: the stages recorded since the last call, as plain tuples."""
    return [tuple(RECORDED.popleft()) for _ in range(len(RECORDED))]


def taken_from(actors: Sequence[Any]) -> list[Stage]:
    """The stages recorded in these actors since the last call."""
    taken: list[list[Any]] = ray.get([actor.__ray_call__.remote(take) for actor in actors])
    return [Stage(*stage) for stages in taken for stage in stages]


def write_trace(stages: Sequence[Stage], path: Path) -> None:
    """Write a Chrome trace (chrome://tracing, Perfetto) with one lane per tier; time 0 is the first stage's beginning.

    Raises `InvalidValueError` if the file cannot be written.
    """
    zero = min((stage.start for stage in stages), default=0.0)
    lanes = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": int(tier), "args": {"name": tier.name.lower()}}
        for tier in Tier
    ]
    events = [
        {
            "name": f"{stage.batch} x {stage.tokens / stage.batch:g}",
            "ph": "X",
            "pid": 1,
            "tid": int(stage.tier),
            "ts": 1e6 * (stage.start - zero),
            "dur": 1e6 * (stage.stop - stage.start),
            "args": {"sequences": stage.batch, "tokens": stage.tokens},
        }
        for stage in stages
    ]
    try:
        path.write_text(json.dumps({"traceEvents": lanes + events, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise InvalidValueError("trace", str(path), f"cannot be written: {error.strerror}") from None
