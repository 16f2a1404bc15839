"""What mkdocs calls while it builds the site: the pages of a folder in the navigation, and links that leave docs/.

On GitHub a page may link to any file of the repository. The site has no such files, so it names them instead.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

OUTWARD = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")  # [text](../path#anchor)


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

    return OUTWARD.sub(named, markdown)
