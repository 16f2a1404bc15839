"""The gRPC services as Serve's proxy registers them. Requests pass the proxy as bytes and are parsed in the gateway,
because the proxy would answer UNKNOWN to bytes that are no message.
"""

from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from deploy.grpc_gate import Gate
from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.errors import InvalidValueError

SERVICERS = [f"{__name__}.{name}" for name in ("add_generation", "add_health")]
Parsed = TypeVar("Parsed", bound=Message)


def add_generation(servicer: Any, server: grpc.Server) -> None:
    _add(pb.DESCRIPTOR.services_by_name["Generation"], servicer, server)


def add_health(servicer: Any, server: grpc.Server) -> None:
    _add(health_pb2.DESCRIPTOR.services_by_name["Health"], servicer, server, is_open=True)


def _add(service: ServiceDescriptor, servicer: Any, server: grpc.Server, *, is_open: bool = False) -> None:
    """As the generated functions do, but without parsing, and behind a gate."""
    makers = {True: grpc.unary_stream_rpc_method_handler, False: grpc.unary_unary_rpc_method_handler}
    handlers = {
        f"/{service.full_name}/{method.name}": makers[method.server_streaming](getattr(servicer, method.name))
        for method in service.methods
    }
    server.add_generic_rpc_handlers((Gate(handlers, is_open=is_open),))


def parsed(kind: type[Parsed], request: Parsed | bytes) -> Parsed:
    """The request as a message. Raises `InvalidValueError`."""
    if not isinstance(request, bytes):
        return request
    try:
        return kind.FromString(request)
    except DecodeError:
        rule = f"must be a message of the type {kind.DESCRIPTOR.full_name}"
        raise InvalidValueError("request", f"{len(request)} bytes", rule) from None
