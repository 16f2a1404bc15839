"""`triforce bench sweep`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from triforce_core.cli.options import JsonOption, SeedOption, with_options_of
from triforce_core.config import Settings
from triforce_core.messages import SamplingParams
from triforce_tools.bench.axes import AXES, Point, check_modes, parse_axes, parse_plans, points_of
from triforce_tools.cli.figures import check_figure, save_figure
from triforce_tools.cli.options import TemperatureOption, pipeline_settings
from triforce_tools.cli.sweep_table import show_sweep

if TYPE_CHECKING:
    from triforce_tools.bench.sweep import OpenBench, Watch, Workload

AXIS_HELP = (
    "what to vary, and its values: context=256,1024 or lookaheads=8,3/4,2, or a name alone for its default values; give"
    f" several for their product; one of {', '.join(AXES)}; context if not given"
)
PLANS_HELP = "fixed plans to measure at every point: retrieval,draft or retrieval,draft:drafter, e.g. 8,3/0,3:lookup"


@with_options_of(pipeline_settings)
def sweep(
    settings: Settings,
    axis: Annotated[list[str] | None, typer.Option(help=AXIS_HELP)] = None,
    plans: Annotated[str | None, typer.Option(help=PLANS_HELP)] = None,
    context: Annotated[int, typer.Option(min=1, help="prompt tokens, where no axis varies them")] = 4096,
    temperature: TemperatureOption = 0.0,
    output: Annotated[int, typer.Option(help="output tokens of each request")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="turns: runs of each mode at each point")] = 5,
    seed: SeedOption = 0,
    first_file: Annotated[int, typer.Option(min=0, help="which held-out file the prompt begins with")] = 0,
    out: Annotated[
        Path, typer.Option(help="finished points are added to this file; those in it are not measured again")
    ] = Path("sweep.jsonl"),
    figure: Annotated[Path | None, typer.Option(help="draw the speed-ups into this file: .svg or .png")] = None,
    max_load: Annotated[float, typer.Option(help="refuse above this load average")] = 1.0,
    force: Annotated[bool, typer.Option("--force", help="run at any load average")] = False,
    as_json: JsonOption = False,
) -> None:
    """Plain decoding against the controller and fixed plans, in turns, at every point of one or more axes.

    With the axis concurrency, requests are decoded together in tier actors; without it, one by one in this process.
    """
    axes, fixed = parse_axes(axis or ["context"]), parse_plans(plans)
    sampled, sparse = SamplingParams(temperature), settings.retrieval
    settings.target.require_lossless()
    base = Point(context, sparse.budget, sparse.chunk, settings.dtype, sampled.temperature)
    points = points_of(axes, base)
    check_modes(points, axes, fixed, settings)
    if figure is not None:
        check_figure(figure)

    from triforce_tools.bench.machine import quiet_machine
    from triforce_tools.bench.pairs import summary_of
    from triforce_tools.bench.sweep import Workload, check_points, num_runs, num_warm_ups, sweep
    from triforce_tools.bench.sweep_file import SweepFile, conditions

    load = Workload(output, repeats, seed, first_file, fixed)
    check_points(points, settings, load)
    file = SweepFile(out, conditions(settings, load))
    left = [point for point in points if file.figures_at(point) is None]
    if left:
        runs = num_runs(left, load) + num_warm_ups(left, load)
        with quiet_machine(max_load, force=force), progression(runs) as watch:
            open_bench = opener("concurrency" in axes, load, watch)
            sweep(left, axes, settings, load, open_bench=open_bench, keep=file.keep, watch=watch)
    finished = [figures for point in points if (figures := file.figures_at(point))]
    summary = summary_of(finished)
    if figure is not None:
        from triforce_tools.bench.sweep_figure import draw_speedups

        save_figure(draw_speedups(finished, axes), figure)
    if as_json:
        typer.echo(json.dumps(file.header | {"points": finished, "summary": summary}))
    else:
        show_sweep(finished, list(axes), summary)


def opener(together: bool, load: Workload, watch: Watch) -> OpenBench:
    """How to run points: in tier actors where concurrency is swept, also at a concurrency of 1, so that all points of a
    line are measured in the same way.
    """
    if not together:
        from triforce_tools.bench.alone import alone

        return partial(alone, load=load, report=watch.report)
    from deploy.app import prepare_environment

    prepare_environment()
    from triforce_tools.tiers.together import together as in_actors

    return partial(in_actors, load=load)


class Progression:
    """A bar over runs on standard error. It is drawn between runs only, since drawing takes their time."""

    def __init__(self, progress: Progress, runs: int) -> None:
        self.progress, self.bar = progress, progress.add_task("", total=runs)
        self.begun = itertools.count()

    def report(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, soft_wrap=True)

    def begin(self, name: str) -> None:
        self.progress.update(self.bar, description=name, completed=next(self.begun), refresh=True)


@contextmanager
def progression(runs: int) -> Iterator[Progression]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        shown = Progression(progress, runs)
        yield shown
        progress.update(shown.bar, description="", completed=runs)
