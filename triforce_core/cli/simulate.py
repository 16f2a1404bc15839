"""`triforce simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from triforce_core.cli.figures import check_figure, save_figure, show_figures
from triforce_core.cli.options import JsonOption, parse_lookaheads, with_options_of
from triforce_core.errors import require
from triforce_core.simulate.scenario import Scenario, load_scenario


def scenario_given(
    scenario_file: Annotated[
        Path | None, typer.Argument(metavar="[SCENARIO]", help="YAML or JSON file; see docs/simulate.md")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="take times and acceptance from this output of `triforce bench pipeline --json`")
    ] = None,
    lookaheads: Annotated[str | None, typer.Option(help="tokens drafted by retrieval and by draft, e.g. 8,3")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="1 is sequential mode")] = None,
    run_ahead: Annotated[
        bool | None, typer.Option("--run-ahead/--no-run-ahead", help="let an idle retrieval tier draft the next block")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(help="users, each with one request at a time")] = None,
    rate: Annotated[float | None, typer.Option(help="requests per second, Poisson")] = None,
    prompt: Annotated[int | None, typer.Option(help="prompt tokens")] = None,
    output: Annotated[int | None, typer.Option(help="output tokens")] = None,
    replicas: Annotated[int | None, typer.Option(help="number of whole pipelines")] = None,
    colocate: Annotated[str | None, typer.Option(help="shared devices: none | draft_with_retrieval | all")] = None,
    alpha_retrieval: Annotated[float | None, typer.Option(help="chance that target accepts a retrieval token")] = None,
    alpha_draft: Annotated[float | None, typer.Option(help="chance that retrieval accepts a draft token")] = None,
    duration: Annotated[float | None, typer.Option(help="simulated seconds in which requests arrive")] = None,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same result")] = None,
) -> Scenario:
    """The scenario of the file, overridden by the sections of the calibration, and both overridden by the options."""
    from triforce_core.simulate.calibration import read_calibration

    rule = "was given: name a scenario file, or --calibrate, or both"
    require(scenario_file is not None or calibrate is not None, "scenario", None, rule)
    require(concurrency is None or rate is None, "rate", rate, "excludes --concurrency: a load is one or the other")
    measured = {} if calibrate is None else read_calibration(calibrate)
    acceptance = _given(retrieval=alpha_retrieval, draft=alpha_draft)
    load = _given(prompt_tokens=prompt, output_tokens=output)
    if concurrency is not None or rate is not None:  # set both, to remove the file's kind of load
        load |= {"concurrency": concurrency, "rate_per_s": rate}
    options = _given(
        lookaheads=None if lookaheads is None else parse_lookaheads(lookaheads),
        micro_batches=micro_batches,
        run_ahead=run_ahead,
        replicas=replicas,
        colocate=colocate,
        duration_s=duration,
        seed=seed,
        acceptance=measured.pop("acceptance", {}) | acceptance or None,
        load=load or (None if scenario_file else {}),
    )
    return load_scenario(scenario_file, measured | options)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@with_options_of(scenario_given)
def simulate(
    scenario: Scenario,
    search: Annotated[
        bool, typer.Option("--plan", help="find the fewest GPUs that serve the load; placement and replicas are free")
    ] = False,
    p95_ms_per_token: Annotated[
        float | None, typer.Option(help="with --plan: 95% of requests take at most these ms per output token")
    ] = None,
    p95_request_s: Annotated[
        float | None, typer.Option(help="with --plan: 95% of requests take at most these seconds")
    ] = None,
    max_gpus: Annotated[int, typer.Option(min=1, help="with --plan: the most GPUs to try")] = 64,
    figure: Annotated[Path | None, typer.Option(help="draw into this file: .svg or .png")] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate throughput and latency of the tiers under a load; with --plan, find the fewest GPUs that serve it."""
    from triforce_core.simulate.model import simulate
    from triforce_core.simulate.plan import Goal, plan

    goals = p95_ms_per_token, p95_request_s
    rule = "must be on, because the p95 limits apply to a search only: add --plan"
    require(search or goals == (None, None), "plan", False, rule)
    if figure is not None:
        check_figure(figure)
    if search:
        planned = plan(scenario, Goal(*goals), max_gpus)
        figures = planned.figures()
        shown = planned.best or planned.tried[-1]
        scenario, result = shown.scenario, shown.result
    else:
        result = simulate(scenario)
        figures = result.figures()
    if figure is not None:
        from triforce_core.simulate.figure import draw

        save_figure(draw(scenario, result), figure)
    show_figures(figures, as_json=as_json)
