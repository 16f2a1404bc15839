"""The picture of an evaluation: acceptance by budget, and recall by length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes as Panel
from matplotlib.figure import Figure

from triforce_tools.evaluation.report import label
from triforce_tools.evaluation.texts import MANY_KEYS

PANEL = (4.6, 3.6)  # inches
COLOURS = ("#3b8ea5", "#e76f51", "#4c9f70", "#5c4d7d", "#c9a227", "#8c8c8c", "#b5446e", "#2f4858", "#7a9e3b")

Row = dict[str, Any]
ValueOf = Callable[[Row], float]


def draw_evaluation(figures: dict[str, Any]) -> Figure:
    """Panels of acceptance and perplexity over budgets in tokens, and one of recall over lengths for each budget that
    is a share of the context. If all budgets are of one kind, all panels are of that kind.
    """
    files = [row for row in figures.get("files", []) if row["half"] == "all"]
    needles = figures.get("needles", [])
    answers = [row for row in needles if row["kind"] == "all"]
    panels: list[tuple[str, str, Sequence[Row], str, ValueOf]] = []
    for title, rows in (("held-out files", files), ("answers of needle inputs", answers)):
        if rows and "acceptance" in rows[0]:
            some = of_kind(rows, percent=False)
            panels += [(f"acceptance, T = {t[1]}", title, some, "budget", acceptance_at(t)) for t in ("T0", "T1")]
    if files and "perplexity" in files[0]:
        some = of_kind(files, percent=False)
        panels.append(("perplexity", "held-out files", some, "budget", lambda row: float(row["perplexity"])))
    if needles:
        many = of_kind([row for row in needles if row["kind"] == MANY_KEYS], percent=True)
        for budget in dict.fromkeys(row["budget"] for row in many if row["budget"]):
            of_budget = [row for row in many if row["budget"] in (None, budget)]
            panels.append(("recall", f"{MANY_KEYS}, {budget}", of_budget, "length", lambda row: float(row["recall"])))
    columns = min(4, max(1, len(panels)))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * max(1, lines)), layout="constrained")
    for number, (value, title, shown, axis, value_of) in enumerate(panels):
        panel = figure.add_subplot(lines, columns, number + 1)
        draw_lines(panel, shown, axis, value_of)
        panel.set_title(title)
        panel.set_ylabel(value)
        if value == "recall":
            panel.set_ylim(-0.05, 1.05)
    return figure


def acceptance_at(temperature: str) -> ValueOf:
    return lambda row: float(row["acceptance"][temperature])


def of_kind(rows: Sequence[Row], *, percent: bool) -> Sequence[Row]:
    """The full cache's rows and those with budgets in percent, or in tokens; all rows if there are no such budgets."""
    some = [row for row in rows if row["budget"] is None or row["budget"].endswith("%") == percent]
    return some if any(row["budget"] for row in some) else rows


def draw_lines(panel: Panel, rows: Sequence[Row], axis: str, value_of: ValueOf) -> None:
    """A line for each cache over the values of the axis; the full cache, which has no budget, is a level line."""
    values = list(dict.fromkeys(row[axis] for row in rows if row[axis] is not None))
    for number, cache in enumerate(dict.fromkeys(row["cache"] for row in rows)):
        own = [row for row in rows if row["cache"] == cache]
        colour = COLOURS[number % len(COLOURS)]
        if own[0][axis] is None:
            panel.axhline(value_of(own[0]), linestyle="--", color="grey", linewidth=1, label=label(cache).strip("`"))
            continue
        at = [values.index(row[axis]) for row in own]
        panel.plot(at, [value_of(row) for row in own], "o-", color=colour, markersize=4, label=label(cache).strip("`"))
    panel.set_xticks(range(len(values)), list(map(str, values)))
    panel.set_xlabel(axis if axis != "budget" else "budget, tokens or share of the context")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
