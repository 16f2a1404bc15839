"""Output of the commands that measure."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.table import Table


def show_figures(figures: dict[str, Any], *, as_json: bool) -> None:
    """Print the figures on standard output, as a table or as one JSON object."""
    if as_json:
        typer.echo(json.dumps(figures))
        return
    table = Table(show_header=False)
    for name, value in figures.items():
        table.add_row(name, json.dumps(value) if isinstance(value, dict | list) else f"{value}")
    Console().print(table)
