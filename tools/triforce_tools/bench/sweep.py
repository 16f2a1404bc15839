"""`triforce bench sweep`: plain decoding against the controller and fixed plans, in turns, at every point of some axes.

The loop over engines, points, turns and modes. A `Bench` runs the points: alone.py decodes one request in this process,
tools/triforce_tools/tiers/together.py several in tier actors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from triforce_core.config import Settings
from triforce_core.engine.limits import target_limits
from triforce_core.engine.sequence import Request
from triforce_core.errors import require
from triforce_core.messages import Drafting, SamplingParams
from triforce_core.models.files import load_config
from triforce_tools.bench.axes import Axes, Mode, Point, by_engine, modes_with, name_of, settings_at
from triforce_tools.bench.pairs import Measured, Runs, figures_of
from triforce_tools.bench.prompts import HELD_OUT, held_out_tokens

WARM_UP_TOKENS = 64  # of output


@dataclass(frozen=True, slots=True)
class Workload:
    """What is the same at all points."""

    output: int  # tokens decoded per request
    repeats: int  # turns
    seed: int
    first_file: int  # of the held-out files: where the first request's prompt begins
    plans: tuple[Mode, ...]


class Bench(Protocol):
    """An engine that runs requests at the points that it was made for."""

    @property
    def about(self) -> dict[str, Any]:
        """What else the record should say about this engine."""
        ...

    def run(self, point: Point, mode: Mode, output: int) -> Measured: ...


class Watch(Protocol):
    """Is told of the sweep's progress."""

    def report(self, text: str) -> None: ...

    def begin(self, name: str) -> None:
        """A run begins, which may be a warm-up."""
        ...


OpenBench = Callable[[Settings, Sequence[Point]], AbstractContextManager[Bench]]
Keep = Callable[[Point, dict[str, Any]], None]  # takes each finished point's figures


class Requests:
    """The requests of a sweep. Prompts are held-out text; those decoded together begin at files in turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, load: Workload) -> None:
        self.tokenizer, self.load = tokenizer, load
        self.prompts: dict[tuple[int, int], tuple[int, ...]] = {}  # by number of tokens and first file

    def at(self, point: Point, mode: Mode, output: int) -> list[Request]:
        sampling = SamplingParams(point.temperature)
        lookaheads = None if mode.plan is None else mode.plan.lookaheads
        drafting = Drafting.MODEL if mode.plan is None else mode.plan.drafting
        return [
            Request(self._prompt(point.context, n), output, sampling, self.load.seed + n, lookaheads, drafting=drafting)
            for n in range(point.requests)
        ]

    def _prompt(self, tokens: int, index: int) -> tuple[int, ...]:
        place = tokens, (self.load.first_file + index) % len(HELD_OUT)
        if place not in self.prompts:
            self.prompts[place] = tuple(held_out_tokens(self.tokenizer, *place))
        return self.prompts[place]


def check_points(points: Sequence[Point], settings: Settings, load: Workload) -> None:
    """Raise `InvalidValueError` for a point that could not be measured, before the first one is."""
    rule = "must be at least 2: the time from one token to the next is measured"
    require(load.output >= 2, "output", load.output, rule)
    config = load_config(settings.target.model, "target")
    for group in by_engine(points):
        limit = target_limits(config, settings_at(settings, group[0])).context_length
        longest = max(point.context for point in group)
        rule = f"and {load.output} tokens of output must fit the context of {limit} tokens"
        require(longest + load.output <= limit, "context", longest, rule)


def num_runs(points: Sequence[Point], load: Workload) -> int:
    """The number of runs, warm-ups included."""
    return len(modes_with(load.plans)) * (load.repeats * len(points) + len(by_engine(points)))


def largest(points: Sequence[Point]) -> Point:
    return max(points, key=lambda point: point.prompt_tokens)


def sweep(
    points: Sequence[Point],
    axes: Axes,
    settings: Settings,
    load: Workload,
    *,
    open_bench: OpenBench,
    keep: Keep,
    watch: Watch,
) -> None:
    """Measure the points, engine by engine."""
    for group in by_engine(points):
        with open_bench(settings_at(settings, group[0]), group) as bench:
            for mode in modes_with(load.plans):  # memory, threads, caches
                watch.begin(f"warm-up, {mode.name}")
                bench.run(largest(group), mode, min(load.output, WARM_UP_TOKENS))
            for point in group:
                keep(point, measured(bench, point, load, watch, name_of(point, axes)))
        del bench  # or it would stay in memory while the next one is loaded


def measured(bench: Bench, point: Point, load: Workload, watch: Watch, name: str) -> dict[str, Any]:
    """The figures of one point. Modes run in turns, every second turn in reverse, so that a machine that slows down
    favours none.
    """
    began, load_before = time.monotonic(), os.getloadavg()[0]
    modes = modes_with(load.plans)
    runs: Runs = {mode.name: [] for mode in modes}
    for repeat in range(load.repeats):
        for mode in modes if repeat % 2 == 0 else reversed(modes):
            watch.begin(f"{name}: {mode.name} {repeat + 1}/{load.repeats}")
            runs[mode.name].append(bench.run(point, mode, load.output))
    figures = figures_of(runs)
    speedups = [f"{mode} {each['speedup']:.2f}×" for mode, each in figures["modes"].items() if mode != "plain"]
    watch.report(f"{name}: plain {figures['modes']['plain']['ms_per_token']:.2f} ms a token, {', '.join(speedups)}")
    return {
        **figures,
        "engine": bench.about,
        "seconds": time.monotonic() - began,
        "load_average": [load_before, os.getloadavg()[0]],
    }
