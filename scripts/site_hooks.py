"""What mkdocs calls while it builds the site: the pages of a folder in the navigation, the parts of the reference that
code describes, and links that leave docs/.

On GitHub a page may link to any file of the repository. The site has no such files, so it names them instead.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page
from prometheus_client import generate_latest

from deploy.metrics import Families, Meters
from deploy.openai_api.document import described, schema_part
from deploy.openai_api.routes import http_app
from deploy.tier_metrics import TierFamilies
from triforce_core.config import Settings

OUTWARD = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")  # [text](../path#anchor)
HEADING = re.compile(r'<h\d(?: id="(\w+)")?>(.*?)</h\d>')
BUILT = re.compile(r"^<!-- built: (.+) -->$", re.MULTILINE)


def on_config(config: Any) -> Any:
    config.nav = [expanded(item, Path(config.docs_dir)) for item in config.nav]
    return config


def expanded(item: Any, docs: Path) -> Any:
    """An item of the navigation; a folder is replaced by its pages."""
    if isinstance(item, dict):
        return {title: expanded(inner, docs) for title, inner in item.items()}
    if isinstance(item, list):
        return [expanded(inner, docs) for inner in item]
    return pages_of(docs, item) if item.endswith("/") else item


def pages_of(docs: Path, folder: str) -> list[str]:
    return sorted(str(page.relative_to(docs)) for page in (docs / folder).glob("*.md"))


# -- the reference -----------------------------------------------------------------------------------------------------


def settings() -> str:
    schema = Settings.model_json_schema()
    sections = {"Settings": schema} | schema["$defs"]
    return as_markdown(part for name, section in sections.items() for part in schema_part(name, section))


def http() -> str:
    """What a running server shows at /docs."""
    unused: Any = None  # the routes are described without a service behind them
    return as_markdown(described(http_app(unused).openapi()))


def as_markdown(parts: Iterable[str]) -> str:
    """The same HTML with headings in Markdown, so that they are in the page's table of contents."""

    def heading(found: re.Match[str]) -> str:
        anchor = f" {{#{found[1]}}}" if found[1] else ""
        return f"\n\n### {found[2]}{anchor}\n\n"

    return HEADING.sub(heading, "".join(parts))


def command_line() -> str:
    """What typer writes of all commands, without its title."""
    command = [sys.executable, "-m", "typer", "deploy.cli.app", "utils", "docs", "--name", "triforce"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.partition("\n")[2]


def metrics() -> str:
    registry = Meters("", lambda: 0, lambda: 0).registry  # no request is counted here
    text = generate_latest(Families(registry, TierFamilies("", {}))).decode()
    heads = re.findall(r"^# HELP (\S+) (.*)\n# TYPE \S+ (\w+)$", text, re.MULTILINE)
    rows = [f"| `{name}` | {kind} | {about} |" for name, about, kind in heads]
    return "\n".join(["| metric | type | meaning |", "| --- | --- | --- |", *rows])


PARTS = {"settings": settings, "http": http, "command line": command_line, "metrics": metrics}


# -- links -------------------------------------------------------------------------------------------------------------


def on_page_markdown(markdown: str, page: Page, config: Any, files: Any) -> str:
    source, docs = Path(page.file.abs_src_path or ""), Path(config.docs_dir)

    def named(link: re.Match[str]) -> str:
        """The link, or its text with the file's path where the file is not part of the site."""
        text, path = link[1], Path(os.path.normpath(source.parent / link[2]))
        if path.is_relative_to(docs):
            return link[0]
        if not path.exists():
            raise PluginError(f"{page.file.src_uri} links to {link[2]}, which does not exist")
        name = f"`{path.relative_to(docs.parent)}`"
        return name if text.strip("`") in name else f"{text} ({name})"

    return BUILT.sub(lambda part: PARTS[part[1]](), OUTWARD.sub(named, markdown))
