"""`triforce bench sweep`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.options import JsonOption, SeedOption, with_options_of
from triforce_core.config import Settings
from triforce_core.messages import SamplingParams
from triforce_tools.bench.axes import AXES, Axes, Point, check_modes, parse_axes, parse_plans, points_of, shown
from triforce_tools.cli.figures import check_figure, progression
from triforce_tools.cli.options import TemperatureOption, pipeline_settings
from triforce_tools.tables import markdown_table, number

if TYPE_CHECKING:
    from triforce_tools.bench.sweep import OpenBench, Watch, Workload

AXIS_HELP = (
    "what to vary, and its values: context=256,1024, or a name alone for its default values; give several"
    f" for their product; one of {', '.join(AXES)}; context if not given"
)
COLUMNS = (
    *("mode", "ms/token", "tokens/s", "spread", "speed-up", "min–max", "tokens/round"),
    *("acceptance retrieval / draft", "speculative", "same tokens"),
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
    check_modes(fixed, settings)
    if figure is not None:
        check_figure(figure)

    from triforce_tools.bench.machine import quiet_machine
    from triforce_tools.bench.pairs import summary_of
    from triforce_tools.bench.sweep import Workload, check_points, num_runs, sweep
    from triforce_tools.bench.sweep_file import SweepFile, conditions

    load = Workload(output, repeats, seed, first_file, fixed)
    check_points(points, settings, load)
    file = SweepFile(out, conditions(settings, load))
    left = [point for point in points if file.figures_at(point) is None]
    if left:
        with quiet_machine(max_load, force=force), progression(num_runs(left, load)) as watch:
            open_bench = opener("concurrency" in axes, load, watch)
            sweep(left, axes, settings, load, open_bench=open_bench, keep=file.keep, watch=watch)
    finished = [figures for point in points if (figures := file.figures_at(point))]
    summary = summary_of(finished)
    if figure is not None:
        from triforce_tools.plots import draw_speedups, save_figure

        save_figure(draw_speedups(finished, axes), figure)
    if as_json:
        typer.echo(json.dumps(file.header | {"points": finished, "summary": summary}))
    else:
        typer.echo(markdown_table([*axes, *COLUMNS], [row for point in finished for row in rows_of(point, axes)]))
        for line in summary_lines(summary, len(finished)):
            typer.echo(line)


def opener(together: bool, load: Workload, watch: Watch) -> OpenBench:
    """How to run points: in tier actors where concurrency is swept, also at a concurrency of 1, so that all points of a
    line are measured in the same way.
    """
    if not together:
        from triforce_tools.bench.alone import alone

        return partial(alone, load=load)
    from deploy.app import prepare_environment

    prepare_environment()
    from triforce_tools.tiers.together import together as in_actors

    return partial(in_actors, load=load)


def rows_of(point: dict[str, Any], axes: Axes) -> Iterator[list[str]]:
    """A row for each mode at a point."""
    place = [shown(point["point"][name]) for name in axes]
    for name, figures in point["modes"].items():
        accepted, plain = figures["acceptance"], name == "plain"
        yield [
            *place,
            name,
            f"{figures['ms_per_token']:.2f}",
            f"{figures['tokens_per_s']:.1f}",
            f"{figures['spread']:.0%}" if plain else "",
            "" if plain else f"{figures['speedup']:.2f}",
            "" if plain else f"{figures['speedup_min']:.2f}–{figures['speedup_max']:.2f}",
            number(figures["tokens_per_round"], ".2f"),
            f"{number(accepted['retrieval'], '.2f')} / {number(accepted['draft'], '.2f')}",
            f"{figures['speculative_share']:.0%}",
            "yes" if figures["identical"] else f"{figures['identical_share']:.0%}",
        ]


def summary_lines(summary: dict[str, Any], num_points: int) -> Iterator[str]:
    means = ", ".join(f"{name} {mean:.2f}×" for name, mean in summary["speedup"].items())
    yield f"geometric mean of the speed-ups over {num_points} points: {means}"
    if summary["auto_over_best"] is not None:
        yield f"controller against the best fixed plan of each point: {summary['auto_over_best']:.2f}×"
