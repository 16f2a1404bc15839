"""Real long prompts from files that come with Python: standard-library sources that the demo pair never saw."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

from triforce_core.errors import require

HELD_OUT = (
    "inspect.py",
    "_pydecimal.py",
    "turtle.py",
    "pydoc.py",
    "email/_header_value_parser.py",
    "tarfile.py",
    "doctest.py",
    "unittest/mock.py",
    "_pyio.py",
    "pickletools.py",
    "datetime.py",
    "subprocess.py",
    "difflib.py",
    "logging/__init__.py",
    "locale.py",
    "enum.py",
    "mailbox.py",
    "http/cookiejar.py",
)


def held_out_path(name: str) -> Path:
    """The file of that name. Since Python 3.12 datetime.py imports all of its code from _pydatetime.py."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    moved = stdlib / f"_py{name}"
    return moved if moved.is_file() else stdlib / name


def held_out_tokens(tokenizer: Any, count: int, first_file: int = 0) -> list[int]:
    """The first `count` tokens of the held-out files, one after another from `first_file` on."""
    tokens: list[int] = []
    for name in HELD_OUT[first_file:] + HELD_OUT[:first_file]:
        if len(tokens) >= count:
            break
        tokens += tokenizer(held_out_path(name).read_text(encoding="utf-8"))["input_ids"]
    require(len(tokens) >= count, "context", count, f"is more than the {len(tokens)} tokens of held-out text")
    return tokens[:count]
