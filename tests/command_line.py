"""`triforce` as users call it, within this process."""

from __future__ import annotations

import sys

import pytest

from deploy.cli import main


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `triforce` with these arguments, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["triforce", *arguments])
    try:
        main()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


class Refusals:
    """Checks that a mistake of a user is told in one line, with exit code 2."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def check(self, named: list[str], *arguments: str) -> None:
        """Check that `triforce` refuses these arguments, in a line that has all of `named`."""
        assert run(self.monkeypatch, *arguments) == 2
        captured = self.capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1, captured.err
        for part in named:
            assert part in captured.err
