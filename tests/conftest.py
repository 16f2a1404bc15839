"""What all tests share: one thread, quiet cores, a reproducible search, and the real prompts."""

from __future__ import annotations

import os

# Before anything imports torch, here and in the processes that tests start: cores are shared, and spinning threads
# would take them from whoever is being measured.
os.environ["OMP_NUM_THREADS"] = os.environ["OMP_THREAD_LIMIT"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import signal
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.starting import LocalRay

# The same examples on every run; `HYPOTHESIS_PROFILE=search` looks for new ones.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

HeldOut = Callable[[str, int], tuple[int, ...]]


def pytest_configure() -> None:
    """A shell has what it runs in the background ignore SIGINT, and so would all processes that the tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need Ray take longest. They come first, so that no worker is left alone with them at the end."""
    items.sort(key=lambda item: not needs_ray(item.nodeid))


def needs_ray(test: str) -> bool:
    return test.startswith(("tests/dist/", "tests/serve/"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n 2`, the tests of a file run on one worker, because they share fixtures. All tests that need Ray run on
    one worker, too: two Rays at work on two cores would keep each other waiting.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if needs_ray(nodeid) else nodeid.partition("::")[0]

    # Otherwise xdist would start with the groups that have most tests; the groups that take longest have few.
    config.option.loadscopereorder = False
    return Groups(config, log)


@pytest.fixture(scope="session")
def held_out() -> HeldOut:
    """held_out(file, count): the first tokens of a standard-library file that the demo pair never saw."""
    from triforce_core.models.files import load_tokenizer

    tokenizer = load_tokenizer("demo")
    encoded: dict[str, tuple[int, ...]] = {}

    def tokens(file: str, count: int) -> tuple[int, ...]:
        if file not in encoded:
            text = Path(sysconfig.get_paths()["stdlib"], file).read_text(encoding="utf-8")
            encoded[file] = tuple(tokenizer.encode(text, add_special_tokens=False))
        assert len(encoded[file]) >= count, f"{file} has only {len(encoded[file])} tokens"
        return encoded[file][:count]

    return tokens


@pytest.fixture(scope="session")
def local_ray() -> Iterator[LocalRay]:
    ray = LocalRay()
    yield ray
    ray.end()
