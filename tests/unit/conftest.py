"""What the tests of single parts share."""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.fixture(autouse=True)
def _own_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests that run benchmarks time nothing, so they need not wait for those of other processes."""
    monkeypatch.setattr("triforce_tools.bench.machine.LOCK", tmp_path / "bench.lock")
