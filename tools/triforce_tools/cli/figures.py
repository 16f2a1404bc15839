"""Output of the commands that measure: figures as a table or as JSON, and how far they are."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from triforce_core.errors import require

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


class Progression:
    """A bar over runs on standard error. It is drawn between runs only, since drawing takes their time."""

    def __init__(self, progress: Progress, runs: int) -> None:
        self.progress, self.bar = progress, progress.add_task("", total=runs)
        self.begun = itertools.count()

    def report(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, soft_wrap=True)

    def begin(self, name: str) -> None:
        self.progress.update(self.bar, description=name, completed=next(self.begun), refresh=True)


@contextmanager
def progression(runs: int) -> Iterator[Progression]:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        shown = Progression(progress, runs)
        yield shown
        progress.update(shown.bar, description="", completed=runs)
