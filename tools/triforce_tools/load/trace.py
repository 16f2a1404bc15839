"""Reads a trace: requests that came to some server, with their times and lengths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from triforce_core.config import invalid_value
from triforce_core.errors import InvalidValueError, require

MOST_TOKENS = 10_000_000  # of a prompt or an output; far beyond every model, and a prompt of it still fits in memory


class TracedRequest(BaseModel):
    """One line of a trace."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    arrival_s: float = Field(ge=0, allow_inf_nan=False)
    input_tokens: int = Field(ge=1, le=MOST_TOKENS)
    output_tokens: int = Field(ge=1, le=MOST_TOKENS)
    priority: int | None = None


def read_trace(path: Path) -> tuple[TracedRequest, ...]:
    """The requests of a file with one JSON object a line, in the order of their arrival; blank lines are skipped.

    Raises `InvalidValueError`, which names file, line, field and rule.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidValueError("trace", str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidValueError("trace", str(path), "is not UTF-8 text") from None
    found: list[TracedRequest] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            request = TracedRequest.model_validate(_object(line, place))
        except ValidationError as error:
            first = invalid_value(error)
            raise InvalidValueError(f"{place}, {first.field}", first.value, first.rule) from None
        in_order = not found or request.arrival_s >= found[-1].arrival_s
        require(in_order, f"{place}, arrival_s", request.arrival_s, "is before the arrival of the line above")
        found.append(request)
    require(bool(found), "trace", str(path), "has no requests")
    return tuple(found)


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    require(isinstance(found, dict), place, line, "must be a JSON object")
    assert isinstance(found, dict)
    return found
