"""What is known of a client's call: its id, its key's name and how it ended. Each is one line of the log, except
checks of health that succeed, and `Check` and `List` of gRPC's health service."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from triforce_core.errors import require

if TYPE_CHECKING:  # Serve's proxies import this module, and should not load torch
    from deploy.parts import Part
    from deploy.tracing import Trace

REQUEST_ID = "x-request-id"  # of headers and of gRPC metadata
MAX_ID_CHARACTERS = 128
SOUND_ID = re.compile(rf"[ -~]{{1,{MAX_ID_CHARACTERS}}}")
log = logging.getLogger("ray.serve")


@dataclass(slots=True)
class Call:
    """A call of the API `http` or `grpc`. `key` is the name of the API key. It holds no prompt and no output."""

    api: str = ""  # empty: the server itself asks
    route: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    key: str = ""
    status: int | str | None = None  # None: the client went away before there was one
    prompt_tokens: int = 0
    completion_tokens: int = 0  # those that were sent
    ttft_s: float | None = None
    duration_s: float = 0.0
    finish_reason: str | None = None  # None: it did not end, or the call asked for no completion
    began: float = field(default_factory=time.monotonic)
    trace: Trace | None = None  # where there are traces

    def saw(self, part: Part) -> None:
        """A part of a completion goes out."""
        self.completion_tokens += len(part.piece.tokens)
        if part.piece.tokens and self.ttft_s is None:
            self.ttft_s = round(time.monotonic() - self.began, 4)
        if part.done:
            self.finish_reason = str(part.done.finish_reason)
            if self.trace is not None:
                self.trace.saw(part, part.done)

    def end(self, form: str) -> None:
        """Log the call: as an object of its own in a log of the form `json`, or as JSON in a line of text."""
        self.duration_s = round(time.monotonic() - self.began, 4)
        said: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        del said["began"], said["trace"]
        if form == "json":
            log.info("call", extra={"call": said})
        else:
            log.info("call %s", json.dumps(said))


# A context variable, and no argument, because every route of every API has it: one that forgot to pass the call on
# would be neither logged nor counted for its key.
_CURRENT: ContextVar[Call] = ContextVar("call")


def begin(call: Call) -> Call:
    """Make this the call of the current context, and of the tasks that it starts."""
    _CURRENT.set(call)
    return call


def current() -> Call:
    """The call of the current context; a new one where the server itself asks, such as for its probe."""
    return _CURRENT.get(None) or Call()


def checked_id(given: str) -> str:
    """A client's request id. Raises `InvalidValueError`."""
    sound = SOUND_ID.fullmatch(given) is not None
    require(
        sound, REQUEST_ID, given[:MAX_ID_CHARACTERS], f"must be 1 to {MAX_ID_CHARACTERS} printable ASCII characters"
    )
    return given
