"""The errors of calls, and the table from gRPC status to exception."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import grpc

from triforce_core.errors import TriForceError


class CallError(TriForceError):
    """Base of the SDK's errors; `code` is the gRPC status behind it."""

    def __init__(self, message: str, code: grpc.StatusCode) -> None:
        super().__init__(message)
        self.code = code


class InvalidRequestError(CallError):
    """A value in the request is invalid; the message names field, value and rule."""


class NotFoundError(CallError):
    """The deployment has no such model, or the proxy no such application."""


class AuthenticationError(CallError):
    """The deployment wants an API key (`api_key`), or does not accept this one."""


class OverloadedError(CallError):
    """The deployment is full; try again later."""


class UnavailableError(CallError):
    """No server answers at the address, or the replica died; try again."""


class FingerprintError(CallError):
    """The deployment's model or settings have changed, so that nothing continues this output; ask anew."""


class EngineCrashError(CallError):
    """The engine died each time that it decoded this request; do not send it again."""


class DeadlineExceededError(CallError):
    """The call took longer than `timeout_s`."""


class CallCancelledError(CallError):
    """The server cancelled the call, or the client was closed."""


class ServerError(CallError):
    """The server failed, or its answer is longer than a message may be, or has a status outside `ERROR_OF_STATUS`."""


ERROR_OF_STATUS: dict[grpc.StatusCode, type[CallError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: FingerprintError,
    grpc.StatusCode.ABORTED: EngineCrashError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: AuthenticationError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CallCancelledError,
}
# What Ray Serve's proxy answers, with the status INTERNAL, when the gateway has died or cannot be reached.
GONE = re.compile(r"\b[Aa]ctor (has )?(died|is dead|is unavailable|was killed)|Actor(Died|Unavailable)Error")
# In gRPC's own words, how a proxy ends a stream because the server behind it has gone.
CUT_OFF = {grpc.StatusCode.CANCELLED: "RST_STREAM", grpc.StatusCode.UNKNOWN: "END_STREAM"}
TOO_LONG = "message larger than max"  # part of gRPC's own message when it refuses to receive or send a message


def broken_off() -> UnavailableError:
    return UnavailableError("the stream ended before its last chunk", grpc.StatusCode.UNAVAILABLE)


def client_closed() -> CallCancelledError:
    return CallCancelledError("the client was closed", grpc.StatusCode.CANCELLED)


@contextmanager
def typed_if(closed: Callable[[], bool]) -> Iterator[None]:
    """Raise gRPC's errors for a call on a closed channel as a `CallCancelledError`; `closed` tells them from others."""
    try:
        yield
    except (ValueError, grpc.aio.UsageError):
        if closed():
            raise client_closed() from None
        raise


def from_rpc_error(error: grpc.RpcError) -> CallError:
    """The typed error for a failed call; statuses outside the table are the server's fault."""
    call = cast(grpc.Call, error)  # gRPC raises the failed call itself
    code, details = call.code(), call.details() or ""
    kind = ERROR_OF_STATUS.get(code, ServerError)
    if code is grpc.StatusCode.INTERNAL and GONE.search(details):
        kind = UnavailableError
    if code in CUT_OFF and CUT_OFF[code] in details:
        kind, code = UnavailableError, grpc.StatusCode.UNAVAILABLE
    if TOO_LONG in details:  # gRPC gives this the status of a full server, after which the call would be tried again
        kind = ServerError
    return kind(details or code.name, code)
