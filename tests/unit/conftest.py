"""What the tests of single parts share."""

from __future__ import annotations

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
