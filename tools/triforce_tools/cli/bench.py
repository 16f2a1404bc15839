"""`triforce bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.cli.options import JsonOption, SeedOption, with_options_of
from triforce_core.config import Settings, TierPlacement
from triforce_core.errors import require
from triforce_core.messages import SamplingParams, Tier
from triforce_tools.cli.bench_peers import peers
from triforce_tools.cli.bench_serve import serve
from triforce_tools.cli.bench_sweep import sweep
from triforce_tools.cli.figures import show_figures
from triforce_tools.cli.options import TemperatureOption, geometry_settings, pipeline_settings

MaxLoadOption = Annotated[float, typer.Option(help="refuse above this load average")]
ForceOption = Annotated[bool, typer.Option("--force", help="run at any load average")]

bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks. Compare figures within one run only.")
bench_app.command()(peers)
bench_app.command()(serve)
bench_app.command()(sweep)


@bench_app.command()
@with_options_of(geometry_settings)
def device(
    settings: Settings,
    geometry: Annotated[
        str, typer.Option(help="llama2-7b-128k, llama-3.1-8b, or a config.json of transformers")
    ] = "llama2-7b-128k",
    drafter_geometry: Annotated[str, typer.Option(help="the drafter's geometry, named in the same way")] = "llama-68m",
    context: Annotated[
        int | None, typer.Option(min=1, help="prompt tokens; by default as many as fit the device, at most 124928")
    ] = None,
    output: Annotated[int, typer.Option(help="output tokens of each run")] = 256,
    prefill: Annotated[str, typer.Option(help="prompt tokens of the prefills that are measured")] = "8192,65536",
    acceptance: Annotated[
        str,
        typer.Option(help="acceptance rates of retrieval and draft tokens; simulated because the weights are random"),
    ] = ".92,.6",
    fill: Annotated[str, typer.Option(help="random | prefill: the source of the prompt's KV")] = "random",
    seed: SeedOption = 0,
    repeats: Annotated[int, typer.Option(min=1, help="runs of each mode; the medians are reported")] = 3,
    max_load: MaxLoadOption = 1.0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Times of each stage for a model's geometry with random weights, and decoding with synthetic acceptance."""
    from triforce_core.machine.device import torch_device
    from triforce_tools.bench.device import DeviceWorkload, bench_device, check, prefill_lengths
    from triforce_tools.bench.fitting import fitting_context
    from triforce_tools.bench.geometry import geometry_of
    from triforce_tools.bench.machine import quiet_machine
    from triforce_tools.bench.synthetic import SyntheticAcceptance

    require(fill in ("random", "prefill"), "fill", fill, "must be random or prefill")
    rates = SyntheticAcceptance.parse(acceptance)
    shapes = geometry_of(geometry, drafter_geometry)
    torch_device(settings.device)  # a missing device is refused at once
    prefills = prefill_lengths(prefill)
    load = DeviceWorkload(context or 1, output, prefills, rates, seed, repeats, fill == "random")
    check(settings, shapes, load)
    if context is None:
        context = fitting_context(settings, shapes, load.room)
    load = load.of(context)
    progress = Console(stderr=True, highlight=False)
    with quiet_machine(max_load, force=force):
        figures = bench_device(settings, shapes, load, progress.print)
    show_figures({"geometry": geometry, "drafter_geometry": drafter_geometry} | figures, as_json=as_json)


@bench_app.command()
@with_options_of(pipeline_settings)
def pipeline(
    settings: Settings,
    requests: Annotated[int, typer.Option(min=1, help="requests decoded together")] = 4,
    context: Annotated[int, typer.Option(min=1, help="prompt tokens of each request")] = 4096,
    output: Annotated[int, typer.Option(help="output tokens of each request")] = 192,
    micro_batches: Annotated[int, typer.Option(min=2, help="micro-batches of the pipelined mode")] = 2,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    repeats: Annotated[int, typer.Option(min=1, help="runs of each mode; the medians are reported")] = 3,
    cores: Annotated[
        str | None, typer.Option(help="CPU core of draft, retrieval and target, e.g. 0,0,1; by default all cores")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="write a Chrome trace of a pipelined run here")] = None,
    max_load: MaxLoadOption = 1.0,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare sequential with pipelined decoding: three tier actors on this machine."""
    from deploy.app import prepare_environment
    from triforce_tools.bench.axes import Point
    from triforce_tools.bench.machine import quiet_machine
    from triforce_tools.bench.sweep import Workload, check_points
    from triforce_tools.tiers.pipeline import bench_pipeline
    from triforce_tools.tiers.stages import write_trace

    if trace is not None:
        require(trace.parent.is_dir(), "trace", str(trace), "is in a directory that does not exist")
    settings.target.require_lossless()
    speculation = settings.speculation.model_copy(update={"micro_batches": micro_batches})
    placement = settings.placement if cores is None else settings.placement.model_copy(update=parse_cores(cores))
    settings = settings.model_copy(update={"speculation": speculation, "placement": placement})
    sparse, sampled = settings.retrieval, SamplingParams(temperature)
    point = Point(context, sparse.budget, sparse.chunk, settings.dtype, sampled.temperature, concurrency=requests)
    load = Workload(output, repeats, seed, 0, ())
    check_points([point], settings, load)
    progress = Console(stderr=True, highlight=False)
    prepare_environment()
    with quiet_machine(max_load, force=force):
        figures, stages = bench_pipeline(settings, point, load, progress.print)
    if trace is not None:
        write_trace(stages, trace)
    show_figures(figures, as_json=as_json)


def parse_cores(text: str) -> dict[str, TierPlacement]:
    """Placements of the tiers, one core each, from a text such as `0,0,1`. Raises `InvalidValueError`."""
    try:
        cores = [int(part) for part in text.split(",")]
    except ValueError:
        cores = []
    require(len(cores) == 3, "cores", text, "must be three core numbers: draft,retrieval,target")
    return {tier.name.lower(): TierPlacement(cores=(core,)) for tier, core in zip(Tier, cores, strict=True)}
