"""`triforce bench paths`."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from triforce_core.cli.options import JsonOption
from triforce_core.errors import TriForceError, require
from triforce_tools.cli.bench_serve import DEFAULT_URL
from triforce_tools.cli.figures import show_figures
from triforce_tools.cli.options import TemperatureOption


def paths(
    url: Annotated[str, typer.Option(help="a running server of one replica")] = DEFAULT_URL,
    grpc: Annotated[str, typer.Option(help="the same server's gRPC address")] = "127.0.0.1:9000",
    context: Annotated[int, typer.Option(help="prompt tokens at most")] = 16000,
    output: Annotated[int, typer.Option(help="output tokens")] = 128,
    repeats: Annotated[int, typer.Option(help="answers measured over each path")] = 5,
    temperature: TemperatureOption = 0.0,
    as_json: JsonOption = False,
) -> None:
    """What HTTP and gRPC add to the time of a token, compared in turns with asking the target directly; and the longest
    gaps in a stream while bodies of 1 MB arrive.
    """
    from triforce_tools.load.answers import FailedError
    from triforce_tools.load.grpc_client import GrpcClient
    from triforce_tools.load.http_client import HttpClient
    from triforce_tools.load.paths import bench_paths

    # A prompt of fewer tokens might have no whole word.
    for name, value, least in (("context", context, 64), ("output", output, 8), ("repeats", repeats, 1)):
        require(value >= least, name, value, f"must be at least {least}")
    try:
        clients = HttpClient(url), GrpcClient(grpc)
    except ValueError as error:  # the key cannot be sent
        raise TriForceError(str(error)) from None
    measured = bench_paths(
        *clients,
        context=context,
        output=output,
        repeats=repeats,
        temperature=temperature,
        progress=lambda text: typer.echo(text, err=True),
    )
    try:
        figures = asyncio.run(measured)
    except FailedError as error:
        raise TriForceError(f"{error.kind}: {error}") from None
    show_figures(figures, as_json=as_json)
