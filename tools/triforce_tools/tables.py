"""Tables of what was measured, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table, its columns padded to one width each, so that it also reads well as plain text."""
    cells = [list(headers), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def pivot(
    rows: Iterable[dict[str, Any]],
    names: Sequence[str],
    axis: str,
    shown: Callable[[Sequence[dict[str, Any]]], str],
) -> str:
    """A table with a line for each combination of values of the fields `names`, and a column for each value of the
    field `axis`. A row without a value on the axis is in all columns. `shown` makes a cell of its rows.
    """
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(tuple(row[name] for name in names), []).append(row)
    values = sorted({row[axis] for line in lines.values() for row in line} - {None}) or ["all"]
    cells = [
        [
            *("" if value is None else str(value) for value in place),
            *(shown([row for row in line if row[axis] in (value, None)]) for value in values),
        ]
        for place, line in lines.items()
    ]
    return markdown_table([*names, *map(str, values)], cells)


def number(value: float | None, form: str) -> str:
    """The number in this format, or a dash where there is none."""
    return "-" if value is None else format(value, form)


def decimals(value: float) -> str:
    """A share with three decimals, without the zero before the point, so that only what is 1 looks like 1."""
    shown = f"{value:.3f}"
    if shown == "1.000" and value != 1:
        shown = "0.999+"
    return shown.removeprefix("0")
