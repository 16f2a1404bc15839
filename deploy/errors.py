"""What can go wrong at the door itself. Each door translates typed errors with one table of its own."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import TypeVar

from triforce_core.errors import TriForceError

log = logging.getLogger("ray.serve")  # whose files an operator reads first
Entry = TypeVar("Entry")


class OverloadedError(TriForceError):
    """All places are taken, waiting ones included; the caller may try again after `retry_after_s` seconds."""

    retry_after_s = 1


class DeadlineError(TriForceError):
    """The request was not done within the time that it or the server allows."""


def entry_for(table: Mapping[type[TriForceError], Entry], error: BaseException) -> Entry | None:
    """The table's entry for the error's class or the nearest base of it."""
    return next((table[cls] for cls in type(error).__mro__ if cls in table), None)


def internal_error(error: BaseException) -> str:
    """What a client is told of an error that nobody foresaw: an id under which the server's log has the rest."""
    error_id = uuid.uuid4().hex[:12]
    log.error("internal error %s", error_id, exc_info=error)
    return f"internal error {error_id}; the server's log tells more"
