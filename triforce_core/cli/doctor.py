"""`triforce doctor`: looks at this machine and the settings, and says what to do."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from triforce_core.cli.options import JsonOption, serving_settings, with_options_of
from triforce_core.config import Settings

if TYPE_CHECKING:
    from deploy.doctor import Finding

COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
WIDEST = 1000  # characters of a line that is not shown on a terminal


@with_options_of(serving_settings)
def doctor(settings: Settings, as_json: JsonOption = False) -> None:
    """Check this machine and the settings, as `triforce serve` with the same options would find them.

    One line for each check: ok, note (it works, but worse than it could) or problem, and what to do. The exit code is 1
    if there is a problem. Nothing is started.
    """
    findings, console = [], Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDEST
    with fast_imports():
        from deploy.doctor import examine

        for name, finding in examine(settings):
            findings.append((name, finding))
            if not as_json:
                console.print(line(name, finding))
    counts = Counter(str(finding.status) for _, finding in findings)
    problems, notes = counts["problem"], counts["note"]
    if as_json:
        checks = [{"name": name, **asdict(finding)} for name, finding in findings]
        typer.echo(json.dumps({"problems": problems, "notes": notes, "checks": checks}))
    else:
        console.print(f"{problems} problem{'' if problems == 1 else 's'}, {notes} note{'' if notes == 1 else 's'}")
    raise typer.Exit(1 if problems else 0)


@contextmanager
def fast_imports() -> Iterator[None]:
    """Run the block without garbage collection, and exempt its objects from the collection at exit: searching PyTorch,
    transformers and Ray for garbage would take a third of the command's time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def line(name: str, finding: Finding) -> Table:
    """A line of the report; on a terminal its text is wrapped within its column."""
    text = finding.found + (f" → {finding.advice}" if finding.advice else "")
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=7, style=COLOURS[finding.status])
    table.add_column(min_width=10)
    table.add_column()
    table.add_row(finding.status, name, Text(text))
    return table
