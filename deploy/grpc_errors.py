"""Translates typed errors to gRPC."""

import grpc

from deploy.errors import (
    EngineCrashError,
    OverloadedError,
    UnauthenticatedError,
    UnknownServiceError,
    entry_for,
    internal_error,
)
from triforce_core.errors import (
    DeadlineError,
    FingerprintError,
    InvalidValueError,
    TriForceError,
    UnavailableError,
    UnknownModelError,
)

STATUSES: dict[type[TriForceError], grpc.StatusCode] = {
    InvalidValueError: grpc.StatusCode.INVALID_ARGUMENT,
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    UnknownModelError: grpc.StatusCode.NOT_FOUND,
    UnknownServiceError: grpc.StatusCode.NOT_FOUND,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    FingerprintError: grpc.StatusCode.FAILED_PRECONDITION,
    EngineCrashError: grpc.StatusCode.ABORTED,
    DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The gRPC status and details of an error. All errors are translated here."""
    code = entry_for(STATUSES, error)
    return (grpc.StatusCode.INTERNAL, internal_error(error)) if code is None else (code, str(error))
