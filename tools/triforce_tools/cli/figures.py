"""Output of the commands that measure: figures as a table or as JSON, and pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from triforce_core.errors import InvalidValueError, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png")


def show_figures(figures: dict[str, Any], *, as_json: bool) -> None:
    """Print the figures on standard output, as a table or as one JSON object."""
    if as_json:
        typer.echo(json.dumps(figures))
        return
    table = Table(show_header=False)
    for name, value in figures.items():
        table.add_row(name, json.dumps(value) if isinstance(value, dict | list) else f"{value}")
    Console().print(table)


def check_figure(path: Path) -> None:
    """Raise `InvalidValueError` for a path that cannot be drawn into; call it before what takes long."""
    require(path.suffix in FORMATS, "figure", str(path), f"must end in one of {', '.join(FORMATS)}")
    require(path.parent.is_dir(), "figure", str(path), "is in a directory that does not exist")


def save_figure(figure: Figure, path: Path) -> None:
    """Write the picture into an SVG or PNG file. Raises `InvalidValueError` if it cannot be written."""
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise InvalidValueError("figure", str(path), f"cannot be written: {error.strerror}") from None
