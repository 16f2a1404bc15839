"""Errors that the APIs add to those of the pipeline. Each API translates typed errors by its own table."""

import logging
import traceback
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from triforce_core.errors import FingerprintError, InvalidValueError, TriForceError, UnavailableError

log = logging.getLogger("ray.serve")  # operators read this logger's files first
Entry = TypeVar("Entry")


class OverloadedError(TriForceError):
    """All places, or all of the key's share, are taken; the caller may try again after `retry_after_s` seconds."""

    retry_after_s = 1


class EngineLostError(UnavailableError):
    """The engine that decoded the request is gone, and none took over in time."""


class EngineCrashError(TriForceError):
    """The engine died each time it decoded this request, which must not be sent again."""


class ReplicaError(UnavailableError):
    """What a replica raises when its pipeline has failed; `replica` is its name."""

    def __init__(self, message: str, replica: str, *, suspect: bool | None = None) -> None:
        super().__init__(message, suspect=suspect)
        self.replica = replica

    def __reduce__(self) -> tuple[Any, ...]:  # Ray carries errors between processes
        return partial(type(self), suspect=self.suspect), (str(self), self.replica)


class OtherFingerprintError(FingerprintError):
    """Raised by the replica named `replica`: it cannot continue this output, which another target began."""

    def __init__(self, message: str, replica: str) -> None:
        super().__init__(message)
        self.replica = replica

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.replica)


class SlowBodyError(InvalidValueError):
    """The body of a request comes too slowly to wait for the rest of it."""


class UnknownServiceError(InvalidValueError):
    """The server has no gRPC service of this name."""


class UnauthenticatedError(TriForceError):
    """The server needs an API key, and the request has none that is valid."""


def entry_for(table: Mapping[type[TriForceError], Entry], error: BaseException) -> Entry | None:
    """The table's entry for the error's class or its nearest base class; None if there is none."""
    return next((table[cls] for cls in type(error).__mro__ if cls in table), None)


def internal_error(error: BaseException) -> str:
    """Log an unforeseen error, and return the message for the client: an id by which to find the error in the log."""
    error_id = uuid.uuid4().hex[:12]
    log.error("internal error %s\n%s", error_id, traced(error))
    return f"internal error {error_id}; the server's log tells more"


def traced(error: BaseException) -> str:
    """The stack of the error, after those of its causes, without messages, which may quote a prompt."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:  # an error may be its own cause: `raise error from error`
        chain.append(cause)
        cause = cause.__context__ if cause.__cause__ is None and not cause.__suppress_context__ else cause.__cause__
    return "\nand then\n".join(
        f"Traceback (most recent call last):\n{''.join(traceback.format_tb(each.__traceback__))}"
        f"{type(each).__module__}.{type(each).__qualname__}"
        for each in reversed(chain)
    )
