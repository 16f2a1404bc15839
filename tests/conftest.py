"""What all tests share: one thread, quiet cores, a reproducible search, and the real prompts."""

from __future__ import annotations

import os

# Before anything imports torch, here and in the processes that tests start: cores are shared, and spinning threads
# would take them from whoever is being measured.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples on every run; `HYPOTHESIS_PROFILE=search` looks for new ones.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

HeldOut = Callable[[str, int], tuple[int, ...]]


@pytest.fixture(scope="session")
def held_out() -> HeldOut:
    """held_out(file, count): the first tokens of a standard-library file that the demo pair never saw."""
    from triforce_core.models.load import load_tokenizer

    tokenizer = load_tokenizer("demo")
    encoded: dict[str, tuple[int, ...]] = {}

    def tokens(file: str, count: int) -> tuple[int, ...]:
        if file not in encoded:
            text = Path(sysconfig.get_paths()["stdlib"], file).read_text(encoding="utf-8")
            encoded[file] = tuple(tokenizer.encode(text, add_special_tokens=False))
        assert len(encoded[file]) >= count, f"{file} has only {len(encoded[file])} tokens"
        return encoded[file][:count]

    return tokens
