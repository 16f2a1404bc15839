"""Mutual TLS between the processes of a pipeline, where Ray itself uses it: `RAY_USE_TLS=1`, with certificates in
`RAY_TLS_SERVER_CERT`, `RAY_TLS_SERVER_KEY` and `RAY_TLS_CA_CERT`, as in Ray's documentation. Both ends then need a
certificate of that authority, the serving one for the address on which it is reached.
"""

import os
from typing import Any

import grpc
import grpc.aio
from ray._common.tls_utils import add_port_to_grpc_server, load_certs_from_env


def serve_on(server: grpc.Server | grpc.aio.Server, host: str) -> str:
    """Add a port to the server, and return its address as `host:port`."""
    return f"{host}:{add_port_to_grpc_server(server, f'{host}:0')}"


def channel(module: Any, place: str, options: list[tuple[str, Any]]) -> Any:
    """A channel of `module`, which is `grpc` or `grpc.aio`, to the address `place`."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):  # as Ray reads it
        return module.insecure_channel(place, options=options)
    certificate, key, authority = load_certs_from_env()
    return module.secure_channel(place, grpc.ssl_channel_credentials(authority, key, certificate), options=options)
