"""The picture of a sweep: speed-ups over the first axis, a line for each value of the second."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes as Panel
from matplotlib.figure import Figure

from triforce_tools.bench.axes import Axes, shown

COLOURS = ("#3b8ea5", "#e76f51", "#4c9f70", "#5c4d7d", "#c9a227", "#8c8c8c")
PANEL = (4.4, 3.4)  # inches
APART = 0.04  # share of the distance between two values by which lines are shifted, so that their bars do not overlap

Figures = dict[str, Any]  # of a point; see pairs.py


def draw_speedups(points: Sequence[Figures], axes: Axes) -> Figure:
    """A panel for each mode, and a row of them for each combination of values of the third axis and those after it.
    With one axis there is one panel, with a line for each mode.
    """
    first, *others = axes
    modes = [name for name in points[0]["modes"] if name != "plain"]
    columns = modes if others else ["all modes"]
    rows = list(itertools.product(*(axes[name] for name in others[1:])))
    figure = Figure(figsize=(PANEL[0] * len(columns), PANEL[1] * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), len(columns), squeeze=False, sharey=True)
    for row, values in enumerate(rows):
        rest = dict(zip(others[1:], values, strict=True))
        here = [point for point in points if all(point["point"][name] == value for name, value in rest.items())]
        for column, title in enumerate(columns):
            panel: Panel = panels[row, column]
            for index, (label, line, mode) in enumerate(lines_of(here, axes, title, modes)):
                draw_line(panel, line, first, axes[first], mode, label, index)
            panel.set_title(", ".join([title, *(f"{name} {shown(value)}" for name, value in rest.items())]))
            finish(panel, first, axes[first])
        panels[row, 0].set_ylabel("times as fast as plain decoding")
    highest = max(point["modes"][mode]["speedup_max"] for point in points for mode in modes)
    panels[0, 0].set_ylim(0, 1.1 * max(1.0, highest))  # of all panels
    return figure


def lines_of(
    points: Sequence[Figures], axes: Axes, column: str, modes: Sequence[str]
) -> list[tuple[str, Sequence[Figures], str]]:
    """The lines of a panel: label, points and mode."""
    if len(axes) == 1:
        return [(mode, points, mode) for mode in modes]
    second = list(axes)[1]
    return [
        (f"{second} {shown(value)}", [point for point in points if point["point"][second] == value], column)
        for value in axes[second]
    ]


def draw_line(
    panel: Panel, points: Sequence[Figures], axis: str, values: Sequence[Any], mode: str, label: str, index: int
) -> None:
    """Medians, with bars from the least to the greatest ratio of a pair."""
    at = [values.index(point["point"][axis]) + APART * index for point in points]
    figures = [point["modes"][mode] for point in points]
    below = [each["speedup"] - each["speedup_min"] for each in figures]
    above = [each["speedup_max"] - each["speedup"] for each in figures]
    medians, colour = [each["speedup"] for each in figures], COLOURS[index % len(COLOURS)]
    panel.errorbar(at, medians, yerr=(below, above), fmt="o-", color=colour, capsize=3, markersize=4, label=label)


def finish(panel: Panel, axis: str, values: Sequence[Any]) -> None:
    panel.axhline(1, linestyle="--", color="grey", linewidth=1)
    panel.set_xticks(range(len(values)), [shown(value) for value in values])
    panel.set_xlabel(axis)
    panel.grid(alpha=0.3)
    panel.legend()
