"""A picture of the latencies: which share of them was at most so long."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from triforce_tools.load.answers import Record
from triforce_tools.load.measures import Goals

COLOUR = "#3b8ea5"


def draw_latencies(records: Sequence[Record], goals: Goals, title: str) -> Figure:
    """The distributions of TTFT, ITL and E2E of whole answers, with the goals as dashed lines."""
    whole = [record for record in records if record.failure is None]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    ttft, itl, e2e = figure.subplots(1, 3, sharey=True)
    draw_shares(ttft, "to the first text (TTFT)", [record.ttft_s for record in whole], goals.ttft_ms)
    draw_shares(itl, "between two chunks (ITL)", [gap for record in whole for gap in record.gaps_s], goals.itl_ms)
    draw_shares(e2e, "to the end (E2E)", [record.e2e_s for record in whole], None)
    ttft.set_ylabel("share that took at most so long")
    figure.suptitle(title)
    return figure


def draw_shares(axes: Axes, title: str, seconds: Sequence[float], goal_ms: float | None) -> None:
    if seconds:
        axes.ecdf([1e3 * each for each in seconds], color=COLOUR)
        axes.set_xlim(left=0)
    if goal_ms is not None:
        axes.axvline(goal_ms, linestyle="--", color="grey")
    axes.set_title(title)
    axes.set_xlabel("milliseconds" if seconds else "none measured")
    axes.grid(alpha=0.3)
