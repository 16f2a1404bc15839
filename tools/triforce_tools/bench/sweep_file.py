"""The file of a sweep: a line for what holds at all points, then one for each finished point. A sweep that was stopped
goes on where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from triforce_core import __version__
from triforce_core.config import Settings
from triforce_core.errors import InvalidValueError, require
from triforce_core.machine.cpu import cpu_summary
from triforce_tools.bench.axes import Point, coordinates
from triforce_tools.bench.sweep import Workload

NAMED = 5  # how many of the values that differ an error names
ABSENT = "nothing"
NO_SWEEP = "holds no sweep: name another file"


def conditions(settings: Settings, load: Workload) -> dict[str, Any]:
    """What must be the same for points to be compared with each other."""
    return {
        "sweep": {
            "output": load.output,
            "repeats": load.repeats,
            "seed": load.seed,
            "first_file": load.first_file,
            "plans": [plan.name for plan in load.plans],
        },
        "machine": {"cpu": cpu_summary(), "cores": os.cpu_count()},
        "versions": {"triforce": __version__, "torch": version("torch"), "transformers": version("transformers")},
        "settings": settings.model_dump(mode="json"),
    }


class SweepFile:
    """The finished points, in the file and in `points`: figures, each with the values of its `point`."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """Reads the file, if there is one. Raises `InvalidValueError` if it holds anything but a sweep under the same
        conditions.
        """
        self.path, self.header = path, json.loads(json.dumps(header))
        require(path.parent.is_dir(), "out", str(path), "is in a directory that does not exist")
        self.points: list[dict[str, Any]] = []
        if path.exists():
            first, *self.points = self._read()
            self._check(first)
        self._write()  # a file that cannot be written is found before anything is measured

    def figures_at(self, point: Point) -> dict[str, Any] | None:
        """The figures of a point, if it is finished."""
        return next((figures for figures in self.points if figures["point"] == coordinates(point)), None)

    def keep(self, point: Point, figures: dict[str, Any]) -> None:
        self.points.append({"point": coordinates(point)} | figures)
        self._write()

    def _write(self) -> None:
        """Whole, beside the old file and then in its place: a sweep may be stopped at any moment."""
        whole = self.path.with_name(self.path.name + ".part")
        try:
            whole.write_text("".join(json.dumps(line) + "\n" for line in (self.header, *self.points)), "utf-8")
            whole.replace(self.path)
        except OSError as error:
            raise InvalidValueError("out", str(self.path), f"cannot be written: {error.strerror}") from None

    def _read(self) -> list[dict[str, Any]]:
        """The lines of a sweep: the header first."""
        try:
            lines = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        except OSError as error:
            raise InvalidValueError("out", str(self.path), f"cannot be read: {error.strerror}") from None
        except ValueError:
            lines = []
        wanted = [self.header.keys(), *[{"point", "modes"}] * (len(lines) - 1)]
        sound = bool(lines) and all(
            isinstance(line, dict) and line.keys() >= keys for line, keys in zip(lines, wanted, strict=False)
        )
        require(sound, "out", str(self.path), NO_SWEEP)
        return lines

    def _check(self, header: dict[str, Any]) -> None:
        there, here = dict(flat(header)), dict(flat(self.header))
        differing = [name for name in there | here if there.get(name, ABSENT) != here.get(name, ABSENT)]
        named = [f"{name} {there.get(name, ABSENT)}, now {here.get(name, ABSENT)}" for name in differing[:NAMED]]
        more = [f"{len(differing) - NAMED} more"] if len(differing) > NAMED else []
        rule = f"was measured otherwise ({'; '.join(named + more)}): name another file"
        require(not differing, "out", str(self.path), rule)


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings by full name, such as `settings.retrieval.budget`."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
