"""`triforce eval`."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.options import JsonOption, decoding_settings, with_options_of
from triforce_core.config import Settings
from triforce_core.errors import InvalidValueError, require
from triforce_tools.cli.figures import progression
from triforce_tools.evaluation.plan import TASKS, EvalPlan, listed, numbers

DEFAULTS = EvalPlan()


@with_options_of(decoding_settings)
def evaluate(
    settings: Settings,
    task: Annotated[str, typer.Option(help=f"some of {', '.join(TASKS)}")] = ",".join(DEFAULTS.tasks),
    caches: Annotated[
        str,
        typer.Option(help="what to measure beside the full cache; triforce is the whole engine", show_default="all"),
    ] = "",
    budgets: Annotated[str, typer.Option(help="tokens of sparse caches")] = ",".join(map(str, DEFAULTS.budgets)),
    lengths: Annotated[str, typer.Option(help="tokens of needle inputs")] = ",".join(map(str, DEFAULTS.lengths)),
    documents: Annotated[int, typer.Option(help="held-out files, in two halves")] = DEFAULTS.documents,
    context: Annotated[int, typer.Option(help="tokens of each file before the scored ones")] = DEFAULTS.context,
    probes: Annotated[int, typer.Option(help="needle inputs of each kind")] = DEFAULTS.probes,
    seed: Annotated[int, typer.Option(min=0, help="of the needle inputs")] = DEFAULTS.seed,
    out: Annotated[
        Path | None, typer.Option(help="write eval.json, eval.md and eval.svg into this folder", file_okay=False)
    ] = None,
    max_load: Annotated[float, typer.Option(help="refuse --task batch above this load average")] = 1.0,
    force: Annotated[bool, typer.Option("--force", help="measure times at any load average")] = False,
    as_json: JsonOption = False,
) -> None:
    """What sparse caches keep of the full cache's answers: needle recall, acceptance, and batches in equal memory."""
    plan = EvalPlan(
        tasks=listed(task),
        caches=listed(caches),
        budgets=numbers("budgets", budgets),
        lengths=numbers("lengths", lengths),
        documents=documents,
        context=context,
        probes=probes,
        seed=seed,
    )
    if out is not None:
        rule = "is in a directory that does not exist"
        require(out.is_dir() or out.absolute().parent.is_dir(), "out", str(out), rule)

    from triforce_tools.bench.machine import quiet_machine
    from triforce_tools.evaluation.evaluate import Evaluation
    from triforce_tools.evaluation.report import report

    evaluation = Evaluation(settings, plan)
    alone = quiet_machine(max_load, force=force) if "batch" in plan.tasks else nullcontext()  # only times need it
    with alone, progression(evaluation.steps) as watch:
        figures = evaluation.run(watch.begin)
    if out is not None:
        from triforce_tools.plots import draw_evaluation, save_figure

        try:
            out.mkdir(exist_ok=True)
            (out / "eval.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
            (out / "eval.md").write_text(report(figures), encoding="utf-8")
        except OSError as error:
            raise InvalidValueError("out", str(out), f"cannot be written: {error.strerror}") from None
        save_figure(draw_evaluation(figures), out / "eval.svg")
    typer.echo(json.dumps(figures) if as_json else report(figures), nl=as_json)
