"""What the pages of the reference are written with."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; line breaks and bars inside its cells would end them."""
    lines = [[*header], *([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def sentence(text: str | None) -> str:
    """A docstring with each of its paragraphs on one line."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text or "").split("\n\n"))


def code(value: object) -> str:
    return f"`{value}`"


def fenced(language: str, path: str) -> str:
    return f"```{language}\n{(REPOSITORY / path).read_text()}```\n"
