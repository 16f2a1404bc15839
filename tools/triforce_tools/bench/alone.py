"""One request at a time in this process: how a sweep runs the points whose requests are not decoded together."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from triforce_core.building.followers import local_ranks
from triforce_core.building.inspection import kernels_of, runners_of
from triforce_core.building.loading import load_local_engine
from triforce_core.config import TIER_SETS, Settings
from triforce_core.engine.engine import Engine, run_to_end
from triforce_core.engine.sequence import Request, Stats
from triforce_core.models.files import load_tokenizer
from triforce_tools.bench.axes import Mode, Point
from triforce_tools.bench.pairs import Measured, Steps
from triforce_tools.bench.sweep import Requests, Workload


class Measurement:
    """One request decoded by one engine: its tokens, its statistics, and the passes of each tier after the prefill."""

    def __init__(self, engine: Engine, request: Request) -> None:
        before: Steps = {}
        tokens: list[int] = []
        for output in run_to_end(engine, [request]):
            if not tokens:  # the prompt's passes are not decoding steps
                before = counters(engine)
            tokens += output.tokens
            self.stats: Stats = output.stats
        self.tokens = tokens
        self.steps = {
            tier: (passes - before[tier][0], seconds - before[tier][1])
            for tier, (passes, seconds) in counters(engine).items()
        }

    @property
    def ms_per_token(self) -> float:
        assert self.stats.ms_per_token is not None
        return self.stats.ms_per_token


def counters(engine: Engine) -> Steps:
    """Forward passes so far and their seconds, by tier."""
    return {tier.name.lower(): (runner.passes, runner.seconds) for tier, runner in runners_of(engine).items()}


class Alone:
    """The whole chain in this process; each run is one request with a prefill of its own, which is not measured."""

    def __init__(self, engine: Engine, requests: Requests) -> None:
        self.engine, self.requests = engine, requests

    @property
    def about(self) -> dict[str, Any]:
        threads = {tier.name.lower(): runner.threads for tier, runner in runners_of(self.engine).items()}
        return {
            "threads": {tier: each and each.latest for tier, each in threads.items()},
            "kernels": {tier.name.lower(): kernels_of(each) for tier, each in runners_of(self.engine).items()},
        }

    def run(self, point: Point, mode: Mode, output: int) -> Measured:
        [request] = self.requests.at(point, mode, output)
        run = Measurement(self.engine, request)
        return Measured(run.ms_per_token, run.stats.prefill_s, [run.tokens], run.stats, run.steps)


@contextmanager
def alone(settings: Settings, points: Sequence[Point], load: Workload) -> Iterator[Alone]:
    """The engine of these settings. Its drafter is loaded whatever their lookaheads are, since plans have their own."""
    gc.collect()  # the parts of an earlier engine refer to each other, and hold its memory
    drafting = TIER_SETS[settings.speculation.tiers][1]
    with local_ranks(settings) as ranks:
        engine = load_local_engine(settings, drafting=drafting, ranks=ranks)
        yield Alone(engine, Requests(load_tokenizer(settings.target.model), load))
