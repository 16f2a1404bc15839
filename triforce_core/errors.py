"""Typed errors. Each boundary (HTTP, gRPC, command line) has one table that translates them."""

from __future__ import annotations

import reprlib
from itertools import islice
from typing import Any

MAX_SHOWN = 80  # characters of a value in a message


class Shown(reprlib.Repr):
    """`repr` that reads no more of a value than is shown of it, however large the value is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 3 * MAX_SHOWN  # what is longer loses its middle
        self.maxlist = self.maxtuple = self.maxdict = MAX_SHOWN // len("1, ")
        self.maxlevel = 3

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)  # it sorts all keys


SHOWN = Shown()


class TriForceError(Exception):
    """Base of all errors that this project raises on purpose."""


class InvalidValueError(TriForceError):
    """A value given by a user breaks a rule; the message names field, value and rule."""

    def __init__(self, field: str, value: object, rule: str) -> None:
        shown = SHOWN.repr(value)
        super().__init__(f"{field}: {shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 3] + '...'} {rule}")
        self.field, self.value, self.rule = field, value, rule

    def __reduce__(self) -> tuple[Any, ...]:  # Ray carries errors between processes
        return type(self).parsed, (str(self),)

    @classmethod
    def parsed(cls, text: str) -> InvalidValueError:
        """The error with the message `text`, as received from another process."""
        field, _, rest = text.partition(": ")
        error = cls(field, None, rest)
        error.args = (text,)
        return error


class TooLargeError(InvalidValueError):
    """A request with more bytes than any valid one."""


class ContextLengthError(InvalidValueError):
    """A prompt that the context window or the KV pool can never hold."""


class UnknownModelError(InvalidValueError):
    """A model name or directory that does not exist."""


class UnsupportedModelError(TriForceError):
    """A model with a feature that this engine does not support; the message names the feature."""


class UnavailableError(TriForceError):
    """A peer that is needed is dead, hung or not ready yet; the caller may try again."""

    def __init__(self, message: str, *, suspect: bool | None = None) -> None:
        """`suspect`: whether the peer died while it worked on the request; None if that is not known."""
        super().__init__(message)
        self.suspect = suspect


class FingerprintError(TriForceError):
    """A target cannot continue an output, because another model or other settings made it."""


class DeadlineError(TriForceError):
    """The request did not finish within the time that the request or the server allows."""


def require(condition: bool, field: str, value: object, rule: str) -> None:
    """Raise `InvalidValueError` naming `field`, `value` and `rule` unless `condition` holds (NaN fails comparisons)."""
    if not condition:
        raise InvalidValueError(field, value, rule)


def reason_of(error: BaseException) -> str:
    """The first line of the error's message, and the next one where the first only introduces it."""
    first, *rest = (str(error) or repr(error)).strip().split("\n")
    return f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first
