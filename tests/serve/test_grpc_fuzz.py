"""Random messages at every method of the gRPC services of a real server, which goes on serving."""

from __future__ import annotations

from collections import Counter
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.conftest import Server
from tests.unit.deploy.test_grpc_fuzz import METHODS, STATUSES, requests
from triforce_core.client import TriForceClient


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_live_server_survives_them_too(server: Server, client: TriForceClient) -> None:
    """It also gets bytes that are no message."""
    seen: Counter[str] = Counter()
    with grpc.insecure_channel(server.grpc_address) as channel:

        @settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
        @given(requests(), st.one_of(st.none(), st.binary(min_size=1, max_size=40)))
        def send(asked: tuple[str, Any], garbage: bytes | None) -> None:
            name, request = asked
            if "max_tokens" in request.DESCRIPTOR.fields_by_name:
                request.max_tokens = min(request.max_tokens or 4, 4)  # the point is not to decode
            path = f"/{METHODS[name].containing_service.full_name}/{name}"
            sent = request.SerializeToString() if garbage is None else garbage
            make = channel.unary_stream if METHODS[name].server_streaming else channel.unary_unary
            call: Any = make(path)
            try:
                answer = call(sent, timeout=30)
                if METHODS[name].server_streaming:
                    for _ in answer:
                        if name == "Watch":
                            break
                    answer.cancel()
                status = "OK"
            except grpc.RpcError as error:
                status = error.code().name
            allowed = STATUSES - {"UNAVAILABLE"}
            assert status in allowed, f"{name}({sent!r}): {status}"
            seen[status] += 1

        send()
    print(f"\n{dict(seen)}")
    server.wait_idle()
    assert client.generate("def main():", max_tokens=4, seed=1).usage.completion_tokens == 4
