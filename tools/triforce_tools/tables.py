"""Tables of what was measured, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table, its columns padded to one width each, so that it also reads well as plain text."""
    cells = [list(headers), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def number(value: float | None, form: str) -> str:
    """The number in this format, or a dash where there is none."""
    return "-" if value is None else format(value, form)


def decimals(value: float) -> str:
    """A share with three decimals, without the zero before the point, so that only what is 1 looks like 1."""
    shown = f"{value:.3f}"
    if shown == "1.000" and value != 1:
        shown = "0.999+"
    return shown.removeprefix("0")
