"""The figures of `triforce bench peers` as a table: a line for each server and mode, a column for each point."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from triforce_tools.tables import markdown_table


def peers_table(figures: dict[str, Any]) -> str:
    """Medians of milliseconds per token, with the least and greatest; the greatest of other figures' medians."""
    rows = figures["rows"]
    points = list(dict.fromkeys((row["context"], row["streams"], row["temperature"]) for row in rows))
    speculating = {row["peer"] for row in rows if row["mode"] != "plain"}
    cells = []
    for server, mode in dict.fromkeys((row["peer"], row["mode"]) for row in rows):
        own = [row for row in rows if (row["peer"], row["mode"]) == (server, mode)]
        by_point = {(row["context"], row["streams"], row["temperature"]): row["ms_per_token"] for row in own}
        first_text = max(median(row["first_text_s"]) for row in own)
        memory = max(median(row["memory_gb"]) for row in own)
        cells.append(
            [
                f"{server}, {mode}" if server in speculating else server,
                *(spread(by_point.get(point, [])) for point in points),
                f"{first_text:.1f} s",
                f"{memory:.1f} GB",
                f"{median(figures['starts_s'][server]):.0f} s",
            ]
        )
    heads = [f"{context:,} tokens, T = {t:g}" + f", {n} at once" * (n > 1) for context, n, t in points]
    return markdown_table(["", *heads, "first text", "memory", "start"], cells)


def lines_of(figures: dict[str, Any]) -> str:
    """As JSON, with a line for each row."""
    parts = []
    for name, value in figures.items():
        rows = value if name == "rows" else []
        told = "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]" if rows else json.dumps(value)
        parts.append(f"{json.dumps(name)}: {told}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def spread(values: list[float]) -> str:
    """The median, and the least and greatest."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{median(values):.1f} ({min(values):.1f}–{max(values):.1f})"
