"""A start that fails is tried again, once, and what the first attempt left is ended before."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.starting import LocalRay, nothing_left, tried_twice


class Starts:
    """Each start leaves a process. The first `failures` starts then fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.started: list[subprocess.Popen[bytes]] = []

    def __call__(self) -> subprocess.Popen[bytes]:
        self.started.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        if len(self.started) <= self.failures:
            raise TimeoutError("the disk is busy")
        return self.started[-1]

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


def test_a_start_that_fails_is_tried_again_without_what_it_left() -> None:
    starts = Starts(failures=1)
    with pytest.warns(UserWarning, match="the disk is busy"):
        process = tried_twice(starts)
    assert [each.poll() is None for each in starts.started] == [False, True]
    assert process is starts.started[-1]
    starts.close()


def test_a_start_that_fails_twice_has_failed() -> None:
    starts = Starts(failures=2)
    with pytest.warns(UserWarning, match="tried again"), pytest.raises(TimeoutError, match="the disk is busy"):
        tried_twice(starts)
    assert [each.poll() is None for each in starts.started] == [False, False]
    starts.close()


def test_what_is_left_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(failures=0)
    monkeypatch.setattr("tests.starting.ENDS_WITHIN_S", 0.1)
    with pytest.raises(AssertionError, match="pid="), nothing_left():
        starts()
    starts.close()


def test_a_ray_that_was_not_started_ends_at_once() -> None:
    LocalRay().end()
