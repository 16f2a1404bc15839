"""The table of a sweep: a row for each mode at each point. It is plain text, and also Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from triforce_tools.bench.axes import shown

Figures = dict[str, Any]  # of a point; see tools/triforce_tools/bench/pairs.py
WIDEST = 1000  # characters, more than a row has
COLUMNS = (
    *("mode", "ms/token", "tokens/s", "spread", "speed-up", "min–max", "tokens/round"),
    *("acceptance retrieval / draft", "speculative", "same tokens"),
)


def show_sweep(points: Sequence[Figures], axes: Sequence[str], summary: dict[str, Any]) -> None:
    """Print the table and the geometric means on standard output, never cut to the width of the terminal."""
    table = Table(box=MARKDOWN)
    for name in (*axes, *COLUMNS):
        table.add_column(name, no_wrap=True)
    for point in points:
        for row in rows_of(point, axes):
            table.add_row(*row)
    width = Console(width=WIDEST).measure(table).maximum
    console = Console(highlight=False, width=width)
    console.print(table)
    for line in summary_lines(summary, len(points)):
        console.print(line, soft_wrap=True)


def rows_of(point: Figures, axes: Sequence[str]) -> Iterator[list[str]]:
    place = [shown(point["point"][name]) for name in axes]
    for name, figures in point["modes"].items():
        accepted, share = figures["acceptance"], figures["identical_share"]
        plain = name == "plain"
        yield [
            *place,
            name,
            f"{figures['ms_per_token']:.2f}",
            f"{figures['tokens_per_s']:.1f}",
            f"{figures['spread']:.0%}" if plain else "",
            "" if plain else f"{figures['speedup']:.2f}",
            "" if plain else f"{figures['speedup_min']:.2f}–{figures['speedup_max']:.2f}",
            number(figures["tokens_per_round"], ".2f"),
            f"{number(accepted['retrieval'], '.2f')} / {number(accepted['draft'], '.2f')}",
            f"{figures['speculative_share']:.0%}",
            "yes" if figures["identical"] else f"{share:.0%}",
        ]


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def summary_lines(summary: dict[str, Any], num_points: int) -> Iterator[str]:
    means = ", ".join(f"{name} {mean:.2f}×" for name, mean in summary["speedup"].items())
    yield f"geometric mean of the speed-ups over {num_points} points: {means}"
    if summary["auto_over_best"] is not None:
        yield f"controller against the best fixed plan of each point: {summary['auto_over_best']:.2f}×"
