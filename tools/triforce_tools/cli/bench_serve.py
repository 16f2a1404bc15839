"""`triforce bench serve`."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer

from deploy.cli.options import JsonOption
from triforce_core.errors import require
from triforce_tools.cli.options import TemperatureOption
from triforce_tools.tables import markdown_table


def serve(
    url: Annotated[str, typer.Option(help="a running server of one replica")] = "http://127.0.0.1:8000",
    grpc: Annotated[str, typer.Option(help="the same server's gRPC address")] = "127.0.0.1:9000",
    context: Annotated[int, typer.Option(help="tokens of each long prompt, or of each document")] = 12_000,
    output: Annotated[int, typer.Option(help="output tokens of each answer")] = 128,
    streams: Annotated[int, typer.Option(help="answers at the same time, each to a prompt of its own")] = 1,
    repeats: Annotated[int, typer.Option(help="turns; the medians are reported")] = 5,
    temperature: TemperatureOption = 0.0,
    beside: Annotated[
        str | None, typer.Option(help="also measure streams beside a load: bodies (of 1 MB) | long-prompts")
    ] = None,
    shared_document: Annotated[
        bool, typer.Option("--shared-document", help="instead: eight questions on one document, and on eight")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Milliseconds per token of a running server over HTTP, over gRPC and from its target's own process, in turns.

    The key in $TRIFORCE_API_KEY is sent, as by the SDK. For a load of many users, see docs/benchmarks/serving.md.
    """
    from triforce_core.machine.cpu import cpu_summary
    from triforce_tools.serving.doors import open_server
    from triforce_tools.serving.shared import measure_shared
    from triforce_tools.serving.streams import BESIDE, Streams, measure_streams

    least = {"context": (context, 64), "output": (output, 16), "streams": (streams, 1), "repeats": (repeats, 1)}
    for name, (value, bound) in least.items():
        require(value >= bound, name, value, f"must be at least {bound}")
    require(temperature >= 0, "temperature", temperature, "must be at least 0")
    require(beside is None or beside in BESIDE, "beside", beside, f"must be one of {', '.join(BESIDE)}")
    require(beside is None or not shared_document, "beside", beside, "excludes --shared-document")

    def report(text: str) -> None:
        typer.echo(text, err=True)

    async def measured() -> list[dict[str, Any]]:
        async with open_server(url, grpc) as server:
            if shared_document:
                return await measure_shared(
                    server, context=context, output=output, temperature=temperature, report=report
                )
            load = Streams(context, output, streams, temperature)
            return await measure_streams(server, load, beside=beside, repeats=repeats, report=report)

    rows = asyncio.run(measured())
    conditions = {"context": context, "output": output, "temperature": temperature, "cpu": cpu_summary()}
    if as_json:
        typer.echo(json.dumps({**conditions, "rows": rows}))
        return
    typer.echo(", ".join(f"{name} {value}" for name, value in conditions.items()) + "\n")
    columns = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    cells = [["-" if row[name] is None else f"{row[name]}" for name in columns] for row in rows]
    typer.echo(markdown_table([name.replace("_", " ") for name in columns], cells))
