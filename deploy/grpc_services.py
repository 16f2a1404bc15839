"""The gRPC services as Serve's proxy registers them. Requests pass the proxy as bytes and are parsed in the gateway,
because the proxy would answer UNKNOWN to bytes that are no message.
"""

from __future__ import annotations

from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.errors import InvalidValueError

SERVICERS = [f"{__name__}.{name}" for name in ("add_generation", "add_health")]
Parsed = TypeVar("Parsed", bound=Message)


def add_generation(servicer: Any, server: grpc.Server) -> None:
    _add(pb.DESCRIPTOR.services_by_name["Generation"], servicer, server)


def add_health(servicer: Any, server: grpc.Server) -> None:
    _add(health_pb2.DESCRIPTOR.services_by_name["Health"], servicer, server)


def _add(service: ServiceDescriptor, servicer: Any, server: grpc.Server) -> None:
    """As the generated functions do, but without parsing."""
    makers = {True: grpc.unary_stream_rpc_method_handler, False: grpc.unary_unary_rpc_method_handler}
    handlers = {
        method.name: makers[method.server_streaming](getattr(servicer, method.name)) for method in service.methods
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


def parsed(kind: type[Parsed], request: Parsed | bytes) -> Parsed:
    """The request as a message. Raises `InvalidValueError`."""
    if not isinstance(request, bytes):
        return request
    try:
        return kind.FromString(request)
    except DecodeError:
        rule = f"must be a message of the type {kind.DESCRIPTOR.full_name}"
        raise InvalidValueError("request", f"{len(request)} bytes", rule) from None
