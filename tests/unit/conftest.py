"""What the tests of single parts share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.by_hand import Below, Counting
from tests.command_line import Refusals


@pytest.fixture
def below() -> Below:
    return Below()


@pytest.fixture
def verifier() -> Counting:
    return Counting()


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusals:
    return Refusals(monkeypatch, capsys)


@pytest.fixture
def own_threads() -> Iterator[None]:
    """Commands and runners set the number of threads. This restores it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _own_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests that run benchmarks time nothing, so they need not wait for those of other processes."""
    monkeypatch.setattr("triforce_tools.bench.machine.LOCK", tmp_path / "bench.lock")
