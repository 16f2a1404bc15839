"""Who may call a tier: whoever was told its address by Ray, since the address comes with a secret that calls carry.

Each process of a tier draws a secret of its own at its start. So a caller that knows the address of an ended process is
refused by the next one, even on the same port, and looks the address up again.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import grpc
import grpc.aio

log = logging.getLogger(__name__)

SECRET = "triforce-secret"  # the metadata of a call that has it
SECRET_BYTES = 32
TELL_S = 10.0  # between two warnings of refused calls


class Address(NamedTuple):
    """Where a process serves, as `host:port`, and the secret without which it serves nobody."""

    place: str
    secret: str

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((SECRET, self.secret),)

    def __repr__(self) -> str:
        return f"Address({self.place!r})"  # which may be logged


class Admission:
    """Refuses calls that do not carry the secret, and counts them."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(SECRET_BYTES)
        self.refused = 0
        self.told_at = -TELL_S

    def admits(self, details: grpc.HandlerCallDetails) -> bool:
        given = [value for name, value in details.invocation_metadata or () if name == SECRET]
        admitted = len(given) == 1 and hmac.compare_digest(str(given[0]).encode(), self.secret.encode())
        if not admitted:
            self.refused += 1
            if time.monotonic() - self.told_at >= TELL_S:
                self.told_at = time.monotonic()
                method = str(details.method)[:100]
                log.warning("%d calls without this process's secret were refused, the last of %r", self.refused, method)
        return admitted


class LinkAdmission(Admission, grpc.ServerInterceptor):  # type: ignore[type-arg]
    """For servers of threads."""

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Any], details: grpc.HandlerCallDetails
    ) -> Any:
        return continuation(details) if self.admits(details) else grpc.stream_stream_rpc_method_handler(refuse)


class TargetAdmission(Admission, grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """For servers on an event loop."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        return (
            await continuation(details) if self.admits(details) else grpc.stream_stream_rpc_method_handler(refuse_async)
        )


RULE = "the secret of this process is missing or wrong"


def refuse(requests: Any, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, RULE)


async def refuse_async(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, RULE)
