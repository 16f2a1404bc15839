"""`triforce bench`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from triforce_core.cli.figures import show_figures
from triforce_core.cli.options import JsonOption, SeedOption, TemperatureOption, decoding_settings, with_options_of
from triforce_core.config import Settings
from triforce_core.messages import SamplingParams

bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks, in ratios within one run.")


@bench_app.command()
@with_options_of(decoding_settings)
def decode(
    settings: Settings,
    context: Annotated[int, typer.Option(help="prompt tokens")] = 7936,
    output: Annotated[int, typer.Option(help="output tokens")] = 256,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    repeats: Annotated[int, typer.Option(min=3, help="runs of each mode; the medians are reported")] = 3,
    first_file: Annotated[int, typer.Option(min=0, help="which held-out file the prompt begins with")] = 0,
    transformers: Annotated[bool, typer.Option("--transformers", help="measure its `generate` too")] = False,
    max_load: Annotated[float, typer.Option(help="refuse above this load average")] = 1.0,
    force: Annotated[bool, typer.Option("--force", help="run whatever the load")] = False,
    as_json: JsonOption = False,
) -> None:
    """Plain decoding against TriForce on the same held-out text, in alternating order."""
    from triforce_core.bench.decode import bench_decode
    from triforce_core.bench.machine import quiet_machine

    progress = Console(stderr=True, highlight=False)
    with quiet_machine(max_load, force=force):
        figures = bench_decode(
            settings,
            context=context,
            output=output,
            sampling=SamplingParams(temperature),
            seed=seed,
            repeats=repeats,
            first_file=first_file,
            with_transformers=transformers,
            report=progress.print,
        )
    show_figures(figures, as_json=as_json)
