"""The pictures of what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes as Panel
from matplotlib.figure import Figure

from triforce_core.errors import InvalidValueError
from triforce_tools.evaluation.texts import MANY_KEYS

PANEL = (4.4, 3.4)  # inches
Figures = dict[str, Any]


def save_figure(figure: Figure, path: Path) -> None:
    """Write the picture into an SVG or PNG file. Raises `InvalidValueError` if it cannot be written."""
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise InvalidValueError("figure", str(path), f"cannot be written: {error.strerror}") from None


# -- eval --------------------------------------------------------------------------------------------------------------


def draw_evaluation(figures: Figures) -> Figure:
    """Acceptance by budget, on held-out files and on the answers of the longest needle inputs, and recall of many keys
    by length, a panel for each budget.
    """
    files = [row for row in figures.get("files", []) if row["half"] == "all"]
    needles, longest = figures.get("needles", []), max(figures["plan"]["lengths"])
    answers = [row for row in needles if row["kind"] == "all" and row["length"] == longest]
    many = [row for row in needles if row["kind"] == MANY_KEYS]
    panels: list[tuple[str, str, list[Figures], str, Callable[[Figures], float]]] = []  # title, value, rows, axis, of
    for title, rows in (("held-out files", files), (f"answers at {longest} tokens", answers)):
        if rows:
            panels.append((title, "acceptance, T = 0", rows, "budget", lambda row: float(row["acceptance"]["T0"])))
            panels.append((title, "acceptance, T = 1", rows, "budget", lambda row: float(row["acceptance"]["T1"])))
    for budget in dict.fromkeys(row["budget"] for row in many if row["budget"]):
        rows = [row for row in many if row["budget"] in (None, budget)]
        panels.append((f"many keys, budget {budget}", "recall", rows, "length", lambda row: float(row["recall"])))
    columns = min(4, max(1, len(panels)))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * max(1, lines)), layout="constrained")
    for number, (title, value, rows, axis, value_of) in enumerate(panels):
        panel = figure.add_subplot(lines, columns, number + 1)
        draw_lines(panel, rows, axis, value_of)
        panel.set_title(title)
        panel.set_ylabel(value)
    return figure


def draw_lines(panel: Panel, rows: Sequence[Figures], axis: str, value_of: Callable[[Figures], float]) -> None:
    """A line for each cache over the values of the axis; a level line for a cache that has no value there."""
    values = sorted({row[axis] for row in rows if row[axis] is not None})
    for cache in dict.fromkeys(row["cache"] for row in rows):
        own = [row for row in rows if row["cache"] == cache]
        if own[0][axis] is None:
            panel.axhline(value_of(own[0]), linestyle="--", color="grey", linewidth=1, label=cache)
        else:
            at = [values.index(row[axis]) for row in own]
            panel.plot(at, [value_of(row) for row in own], "o-", markersize=4, label=cache)
    panel.set_xticks(range(len(values)), list(map(str, values)))
    panel.set_xlabel(f"{axis}, tokens")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
