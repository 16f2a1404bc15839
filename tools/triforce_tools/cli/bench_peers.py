"""`triforce bench peers`."""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from platformdirs import user_cache_path

from deploy.cli.options import JsonOption
from triforce_core.config import load_settings
from triforce_core.errors import TriForceError, require
from triforce_tools.bench.axes import parse_temperature, parse_whole
from triforce_tools.cli.figures import check_figure
from triforce_tools.peers.table import lines_of, peers_table

ENVIRONMENTS = user_cache_path("triforce-serve") / "peers"
DTYPES = ("bfloat16", "float16", "float32")


def sources() -> str:
    """A digest of the server's own code."""
    packages = (Path(find_spec(name).origin).parent for name in ("triforce_core", "actors", "deploy"))  # type: ignore
    files = sorted(file for package in packages for file in package.rglob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def peers(
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="ours | ours-auto | engine | vllm | llama.cpp | transformers, the last three also with -ngram, -draft"
            " or -lookup, -assisted; give several; all if not given"
        ),
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
    use; seconds to the first text of a prompt that nobody has read. `ours-auto` has `placement.colocate: auto`;
    `engine` is ours in one process, without Ray.
    """
    from deploy.app import interrupt, on_signals
    from triforce_core.building.drafters import drafter_weights
    from triforce_core.machine.cpu import cpu_summary, usable_cores
    from triforce_tools.bench.machine import quiet_machine
    from triforce_tools.peers.compare import Found, Load, compare
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
    settings = load_settings(config)
    models = settings.target.model, drafter_weights(settings)
    prompts = load.prompts(settings.target.model)

    def report(text: str) -> None:
        typer.echo(text, err=True)

    environments = environments.absolute()
    environments.mkdir(parents=True, exist_ok=True)
    found, known = Found(), dict[str, dict[str, str]]()
    for name in names:
        try:
            install(name, environments, report)
            known[name] = versions(name, environments)
        except TriForceError as error:
            found.gaps[name] = str(error)
            report(str(error))
    about: dict[str, Any] = {
        "cpu": cpu_summary(),
        "dtype": dtype,
        "output": output,
        "cores": usable_cores(),
        "sources": sources(),
        "settings": settings.model_dump(mode="json"),
        "asked": {"context": context, "temperature": temperature, "streams": streams},
    }
    if out.is_file():
        before: dict[str, Any] = json.loads(out.read_text())
        of_before = before.get("versions", {})
        same = about.items() <= before.items() and all(of_before.get(name, of) == of for name, of in known.items())
        require(same, "out", str(out), "holds another run's figures: name another file, or remove it")
        found.rows, found.starts_s, known = before["rows"], before["starts_s"], of_before | known
        report(f"going on with {out}: {sum(map(len, found.starts_s.values()))} turns are there")
    about["versions"] = known

    def keep() -> None:
        out.write_text(lines_of(about | {"same_texts": found.same_texts()} | asdict(found)))

    keep()
    with quiet_machine(max_load, force=force), on_signals(interrupt):  # so that servers end with this command
        compare(
            names,
            models,
            load,
            prompts,
            found,
            config=config,
            dtype=dtype,
            environments=environments,
            report=report,
            keep=keep,
        )
    if figure is not None:
        from triforce_tools.plots import draw_peers, save_figure

        save_figure(draw_peers(found.rows), figure)
    if as_json:
        typer.echo(out.read_text())
        return
    if found.rows:
        typer.echo(peers_table(json.loads(out.read_text())))
    for name, why in found.gaps.items():
        typer.echo(f"{name}: not compared: {why}")
