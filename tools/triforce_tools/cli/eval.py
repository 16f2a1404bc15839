"""`triforce eval`."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from triforce_core.cli.options import JsonOption, decoding_settings, with_options_of
from triforce_core.config import Settings
from triforce_core.errors import InvalidValueError, require
from triforce_tools.cli.figures import progression
from triforce_tools.evaluation.plan import TASKS, TIMED, Budget, EvalPlan, listed, parse_lengths

DEFAULTS = EvalPlan()


@with_options_of(decoding_settings)
def evaluate(
    settings: Settings,
    task: Annotated[str, typer.Option(help=f"some of {', '.join(TASKS)}")] = ",".join(DEFAULTS.tasks),
    selectors: Annotated[
        str,
        typer.Option(help="caches to measure, beside the full one; triforce is the whole engine", show_default="all"),
    ] = "",
    budgets: Annotated[
        str, typer.Option(help="of sparse caches: tokens, or a share of the context such as 5%")
    ] = ",".join(budget.name for budget in DEFAULTS.budgets),
    lengths: Annotated[str, typer.Option(help="tokens of needle inputs, and contexts of the costs")] = ",".join(
        map(str, DEFAULTS.lengths)
    ),
    documents: Annotated[int, typer.Option(help="held-out files, in two halves")] = DEFAULTS.documents,
    context: Annotated[int, typer.Option(help="tokens of each file before the scored ones")] = DEFAULTS.context,
    probes: Annotated[int, typer.Option(help="needle inputs of each kind")] = DEFAULTS.probes,
    seed: Annotated[int, typer.Option(min=0, help="of the needle inputs")] = DEFAULTS.seed,
    out: Annotated[
        Path | None, typer.Option(help="write eval.json, eval.md and eval.svg into this folder", file_okay=False)
    ] = None,
    max_load: Annotated[float, typer.Option(help="refuse --task cost and batch above this load average")] = 1.0,
    force: Annotated[bool, typer.Option("--force", help="measure times at any load average")] = False,
    as_json: JsonOption = False,
) -> None:
    """What sparse caches keep of the full cache's answers: needle recall, perplexity, agreement, acceptance, cost."""
    plan = EvalPlan(
        tasks=listed(task),
        caches=listed(selectors),
        budgets=tuple(map(Budget.parse, listed(budgets))),
        lengths=parse_lengths(lengths),
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
    timed = bool(TIMED & set(plan.tasks))
    alone = quiet_machine(max_load, force=force) if timed else nullcontext()  # load changes times only
    with alone, progression(evaluation.steps) as watch:
        figures = evaluation.run(watch)
    if out is not None:
        from triforce_tools.evaluation.figure import draw_evaluation
        from triforce_tools.plots import save_figure

        save_text(out, "eval.json", json.dumps(figures, indent=1) + "\n")
        save_text(out, "eval.md", report(figures))
        save_figure(draw_evaluation(figures), out / "eval.svg")
    typer.echo(json.dumps(figures) if as_json else report(figures), nl=as_json)


def save_text(folder: Path, name: str, text: str) -> None:
    """Write a file of the folder, which is made if need be. Raises `InvalidValueError` if that is impossible."""
    try:
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidValueError("out", str(folder / name), f"cannot be written: {error.strerror}") from None
