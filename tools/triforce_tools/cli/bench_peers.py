"""`triforce bench peers`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from platformdirs import user_cache_path

from deploy.cli.options import JsonOption
from triforce_core.config import load_settings
from triforce_core.errors import require
from triforce_tools.bench.axes import parse_temperature, parse_whole
from triforce_tools.cli.figures import check_figure
from triforce_tools.tables import markdown_table

ENVIRONMENTS = user_cache_path("triforce-serve") / "peers"
DTYPES = ("bfloat16", "float16", "float32")


def peers(
    peer: Annotated[
        list[str] | None, typer.Option(help="ours | engine | vllm | transformers; give several; all if not given")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="settings of ours; others get its target")] = None,
    dtype: Annotated[str, typer.Option(help="of all servers: float32 | bfloat16 | float16")] = "bfloat16",
    context: Annotated[str, typer.Option(help="tokens of each prompt")] = "2048,8192",
    temperature: Annotated[str, typer.Option(help="of the answers")] = "0,0.8,1",
    streams: Annotated[str, typer.Option(help="answers at the same time, each to a prompt of its own")] = "1,4",
    output: Annotated[int, typer.Option(help="output tokens of each answer")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="turns: starts of each server")] = 3,
    environments: Annotated[
        Path, typer.Option(help="where servers have their environments, which are made if missing, and their logs")
    ] = ENVIRONMENTS,
    out: Annotated[Path, typer.Option(help="the figures, written after each server")] = Path("peers.json"),
    figure: Annotated[Path | None, typer.Option(help="draw CPU time by process into this file: .svg or .png")] = None,
    max_load: Annotated[float, typer.Option(help="refuse above this load average")] = 1.0,
    force: Annotated[bool, typer.Option("--force", help="run at any load average")] = False,
    as_json: JsonOption = False,
) -> None:
    """Other servers and ours, one at a time, with the same model and prompts over HTTP, in turns.

    Milliseconds per token after the first, as a client sees them, and those of CPU that all of the server's processes
    use; seconds to the first text of a prompt that nobody has read. `engine` is ours in one process.
    """
    from deploy.app import interrupt, on_signals
    from triforce_core.machine.cpu import cpu_summary
    from triforce_tools.bench.machine import quiet_machine
    from triforce_tools.peers.compare import Load, compare
    from triforce_tools.peers.servers import PEERS, install, versions

    names = peer or [*PEERS]
    for name in names:
        require(name in PEERS, "peer", name, f"must be one of {', '.join(PEERS)}")
    require(dtype in DTYPES, "dtype", dtype, f"must be one of {', '.join(DTYPES)}")
    require(output >= 16, "output", output, "must be at least 16")
    if figure is not None:
        check_figure(figure)
    load = Load(
        [parse_whole("context", each) for each in context.split(",")],
        [parse_temperature("temperature", each) for each in temperature.split(",")],
        [parse_whole("streams", each) for each in streams.split(",")],
        output,
        repeats,
    )
    target = load_settings(config).target.model
    prompts = load.prompts(target)

    def report(text: str) -> None:
        typer.echo(text, err=True)

    environments = environments.absolute()
    environments.mkdir(parents=True, exist_ok=True)
    for name in names:
        install(name, environments, report)
    figures: dict[str, Any] = {
        "cpu": cpu_summary(),
        "dtype": dtype,
        "output": output,
        "versions": {name: versions(name, environments) for name in names},
    }

    def keep(rows: list[dict[str, Any]]) -> None:
        out.write_text(json.dumps(figures | {"rows": rows}, indent=1) + "\n")

    with quiet_machine(max_load, force=force), on_signals(interrupt):  # so that servers end with this command
        rows = compare(
            names,
            target,
            load,
            prompts=prompts,
            config=config,
            dtype=dtype,
            environments=environments,
            report=report,
            keep=keep,
        )
    if figure is not None:
        from triforce_tools.plots import draw_peers, save_figure

        save_figure(draw_peers(rows), figure)
    if as_json:
        typer.echo(json.dumps(figures | {"rows": rows}))
        return
    columns = ("context", "streams", "temperature", "peer", "mode")
    order = sorted(rows, key=lambda row: [row[name] for name in columns])
    cells = [
        [*(str(row[name]) for name in columns), *map(spread, (row["ms_per_token"], cpu_ms(row), row["first_text_s"]))]
        for row in order
    ]
    typer.echo(markdown_table([*columns, "ms per token", "CPU ms", "first text, s"], cells))


def cpu_ms(row: dict[str, Any]) -> list[float]:
    """Of all processes, in each turn."""
    return [sum(turn.values()) for turn in row["cpu_ms_per_token"]]


def spread(values: list[float]) -> str:
    """The median, and the least and greatest."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{median(values):.2f} ({min(values):.2f}–{max(values):.2f})"
