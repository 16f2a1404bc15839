"""What a check of `triforce doctor` found, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from triforce_core.config import Settings


class Status(StrEnum):
    OK = "ok"
    NOTE = "note"  # the server works, but worse than it could
    PROBLEM = "problem"  # the server does not start, or fails later


@dataclass(frozen=True, slots=True)
class Finding:
    status: Status
    found: str
    advice: str = ""  # what to do; empty if and only if the status is ok


Check = Callable[[Settings], Finding]


def ok(found: str) -> Finding:
    return Finding(Status.OK, found)


def note(found: str, advice: str) -> Finding:
    return Finding(Status.NOTE, found, advice)


def problem(found: str, advice: str) -> Finding:
    return Finding(Status.PROBLEM, found, advice)
