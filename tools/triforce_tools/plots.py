"""The pictures of what was measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes as Panel
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from triforce_core.errors import InvalidValueError
from triforce_tools.bench.axes import Axes, shown
from triforce_tools.evaluation.texts import MANY_KEYS

PANEL = (4.4, 3.4)  # inches
APART = 0.04  # share of the distance between two values by which lines are shifted, so that their bars do not overlap
Figures = dict[str, Any]


def save_figure(figure: Figure, path: Path) -> None:
    """Write the picture into an SVG or PNG file. Raises `InvalidValueError` if it cannot be written."""
    try:
        with rc_context({"svg.fonttype": "none"}):  # half the size, and it can be searched
            figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise InvalidValueError("figure", str(path), f"cannot be written: {error.strerror}") from None


# -- bench sweep -------------------------------------------------------------------------------------------------------


def draw_speedups(points: Sequence[Figures], axes: Axes) -> Figure:
    """Speed-ups over the first axis: a panel for each mode and each combination of the values of the third axis and
    those after it, in which each value of the second axis has a line. Lines go through medians; bars reach from the
    least to the greatest ratio of a pair.
    """
    first, *others = axes
    modes = [name for name in points[0]["modes"] if name != "plain"]
    rest = list(itertools.product(*(axes[name] for name in others[1:])))
    figure = Figure(figsize=(PANEL[0] * len(modes), PANEL[1] * len(rest)), layout="constrained")
    panels = figure.subplots(len(rest), len(modes), squeeze=False, sharey=True)
    for row, values in enumerate(rest):
        place = dict(zip(others[1:], values, strict=True))
        here = [point for point in points if all(point["point"][name] == value for name, value in place.items())]
        for panel, mode in zip(panels[row], modes, strict=True):
            for index, (label, line) in enumerate(lines_of(here, axes)):
                figures = [point["modes"][mode] for point in line]
                at = [axes[first].index(point["point"][first]) + APART * index for point in line]
                medians = [each["speedup"] for each in figures]
                below = [each["speedup"] - each["speedup_min"] for each in figures]
                above = [each["speedup_max"] - each["speedup"] for each in figures]
                panel.errorbar(at, medians, yerr=(below, above), fmt="o-", capsize=3, markersize=4, label=label)
            panel.axhline(1, linestyle="--", color="grey", linewidth=1)
            panel.set_xticks(range(len(axes[first])), [shown(value) for value in axes[first]])
            panel.set_xlabel(first)
            panel.set_title(", ".join([mode, *(f"{name} {shown(value)}" for name, value in place.items())]))
            panel.grid(alpha=0.3)
            if others:
                panel.legend()
        panels[row, 0].set_ylabel("times as fast as plain decoding")
    highest = max(point["modes"][mode]["speedup_max"] for point in points for mode in modes)
    panels[0, 0].set_ylim(0, 1.1 * max(1.0, highest))  # of all panels
    return figure


def lines_of(points: Sequence[Figures], axes: Axes) -> Iterator[tuple[str, Sequence[Figures]]]:
    """The lines of a panel: label and points."""
    if len(axes) == 1:
        yield "", points
        return
    second = list(axes)[1]
    for value in axes[second]:
        yield f"{second} {shown(value)}", [point for point in points if point["point"][second] == value]


# -- bench peers -------------------------------------------------------------------------------------------------------

LEAST_MS = 0.5  # of CPU a token; processes below it are drawn together


def draw_peers(rows: Sequence[Figures]) -> Figure:
    """CPU milliseconds per token by process, and as a dot the milliseconds that a client waits: a panel for each point,
    with a bar for each server and mode.
    """
    points = list(dict.fromkeys((row["context"], row["temperature"], row["streams"]) for row in rows))
    figure = Figure(figsize=(2 * PANEL[0], PANEL[1] * len(points)), layout="constrained")
    panels = figure.subplots(len(points), 1, squeeze=False, sharex=True)[:, 0]
    colours: dict[str, Any] = {}
    for panel, point in zip(panels, points, strict=True):
        here = [row for row in rows if (row["context"], row["temperature"], row["streams"]) == point]
        for row in here:
            bar, began = f"{row['peer']}, {row['mode']}", 0.0
            for process, used in by_process(row["cpu_ms_per_token"]).items():
                colour = colours.setdefault(process, colormaps["tab20"](len(colours) % 20))
                panel.barh(bar, used, left=began, color=colour)
                began += used
            panel.plot(median(row["ms_per_token"]), bar, "ko")
        panel.invert_yaxis()
        panel.set_title(f"{point[0]} tokens, T = {point[1]:g}, {point[2]} at once")
        panel.grid(alpha=0.3, axis="x")
    panels[-1].set_xlabel("milliseconds per token: bars: CPU by process; dots: as the client waits")
    shown_as = [Patch(color=colour) for colour in colours.values()]
    figure.legend(shown_as, list(colours), fontsize=7, loc="outside lower center", ncols=3)
    return figure


def by_process(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians over the turns, the greatest first; small ones as one."""
    names = dict.fromkeys(name for turn in turns for name in turn)
    medians = {name: median(turn.get(name, 0.0) for turn in turns) for name in names}
    found = {name: each for name, each in sorted(medians.items(), key=lambda item: -item[1]) if each >= LEAST_MS}
    return found | {"others": sum(medians.values()) - sum(found.values())}


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
