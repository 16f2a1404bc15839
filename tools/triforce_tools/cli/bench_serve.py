"""`triforce bench serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from triforce_core.cli.options import JsonOption, with_options_of
from triforce_core.errors import TriForceError, require
from triforce_tools.cli.figures import check_figure, save_figure, show_figures
from triforce_tools.cli.options import TemperatureOption
from triforce_tools.load.trace import read_trace
from triforce_tools.load.workload import Lengths, Load

if TYPE_CHECKING:
    from triforce_tools.load.answers import Record

DEFAULT_URL = "http://127.0.0.1:8000"


def load_given(
    rate: Annotated[float | None, typer.Option(help="requests per second, Poisson")] = None,
    concurrency: Annotated[int | None, typer.Option(help="users, each with one request at a time")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="requests as in this file: arrival_s, input_tokens, output_tokens, one JSON object a line"),
    ] = None,
    requests: Annotated[int | None, typer.Option(help="end after this many requests")] = None,
    duration: Annotated[float | None, typer.Option(help="send no more requests after this many seconds")] = None,
    input: Annotated[
        str | None, typer.Option(help="prompt tokens: 2048, or 512:8192 for a range; 512 if not given")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="output tokens at most, written likewise; 128 if not given")
    ] = None,
    shared: Annotated[float, typer.Option(help="share of requests that begin with a common document")] = 0.0,
    documents: Annotated[int, typer.Option(help="number of common documents")] = 1,
    seed: Annotated[int, typer.Option(help="the same seed gives the same load")] = 0,
) -> Load:
    """The load of the options. Raises `InvalidValueError`."""
    stated = [name for name, value in (("input", input), ("output", output)) if value is not None]
    if trace is not None:
        require(not stated, "trace", str(trace), f"states the lengths: leave out {' and '.join(stated)}")
    return Load(
        rate=rate,
        concurrency=concurrency,
        trace=None if trace is None else read_trace(trace),
        requests=requests,
        duration_s=duration,
        input=Lengths.parse("input", "512" if input is None else input),
        output=Lengths.parse("output", "128" if output is None else output),
        shared=shared,
        documents=documents,
        seed=seed,
    )


@contextmanager
def load_progress(load: Load) -> Iterator[Callable[[Record], None]]:
    """Shows a progress bar on standard error, and gives the function that is told each record. The bar has no end where
    only the time bounds the load.
    """
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests, {task.fields[refused]} refused, {task.fields[failed]} failed"),
        TimeElapsedColumn(),
    )
    bounds = [*([load.requests] if load.requests else []), *([len(load.trace)] if load.trace else [])]
    refused = failed = 0
    # Drawn rarely, since drawing takes the sender's time.
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        bar = progress.add_task("", total=min(bounds, default=None), refused=0, failed=0)

        def watch(record: Record) -> None:
            nonlocal refused, failed
            refused += record.failure is not None and record.failure.refused
            failed += record.failure is not None and not record.failure.refused
            progress.update(bar, advance=1, refused=refused, failed=failed)

        yield watch


@with_options_of(load_given)
def serve(
    load: Load,
    url: Annotated[str | None, typer.Option(help=f"an OpenAI-compatible server; {DEFAULT_URL} if not given")] = None,
    grpc: Annotated[str | None, typer.Option(help="our gRPC service instead, such as 127.0.0.1:9000")] = None,
    model: Annotated[str | None, typer.Option(help="by default the first that the server names")] = None,
    temperature: TemperatureOption = 1.0,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="for goodput: the first text comes within this time")
    ] = None,
    slo_itl_ms: Annotated[
        float | None, typer.Option(help="for goodput: the mean time between an answer's chunks is at most this")
    ] = None,
    timeout: Annotated[float, typer.Option(help="seconds until a request that is not answered is an error")] = 600.0,
    figure: Annotated[Path | None, typer.Option(help="draw the latencies into this file: .svg or .png")] = None,
    as_json: JsonOption = False,
) -> None:
    """Send a load to a running server and measure its latencies, its throughput, and its errors.

    The key in $TRIFORCE_API_KEY is sent, as by the SDK.
    """
    from triforce_tools.load.grpc_client import GrpcClient
    from triforce_tools.load.http_client import HttpClient
    from triforce_tools.load.measures import Goals
    from triforce_tools.load.serve import bench_serve

    require(url is None or grpc is None, "grpc", grpc, "excludes --url: one server is asked")
    require(0 < timeout < float("inf"), "timeout", timeout, "must be above 0 s and finite")
    require(temperature >= 0, "temperature", temperature, "must be at least 0")
    goals = Goals(slo_ttft_ms, slo_itl_ms)
    if figure is not None:
        check_figure(figure)
    try:
        client = HttpClient(url or DEFAULT_URL) if grpc is None else GrpcClient(grpc)
    except ValueError as error:  # the key cannot be sent
        raise TriForceError(str(error)) from None

    async def measured() -> tuple[dict[str, Any], list[Record]]:
        async with client:
            return await bench_serve(
                client,
                load,
                goals,
                model=model,
                temperature=temperature,
                timeout_s=timeout,
                progress=load_progress(load),
            )

    figures, records = asyncio.run(measured())
    figures = {"server": client.address} | figures
    if figure is not None:
        from triforce_tools.load.figure import draw_latencies

        save_figure(draw_latencies(records, goals, f"{len(records)} requests, {client.address}"), figure)
    show_figures(figures, as_json=as_json)
    if not figures["answered"]:
        raise typer.Exit(1)
