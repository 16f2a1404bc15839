"""Many requests at once, too many at once, and clients that go away."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
import requests

from tests.serve.conftest import MAX_QUEUED, MAX_SEQUENCES, Server
from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core._gen.triforce.v1.generation_pb2_grpc import GenerationStub
from triforce_core.client import DeadlineExceededError, OverloadedError, TriForceClient

LONG = {"prompt": "def main():", "max_tokens": 6000, "temperature": 0.0}  # runs in circles: no early end


@contextmanager
def silent_client(server: Server, **fields: Any) -> Iterator[None]:
    """A client that sends a request and reads nothing. It hangs up at the end of the context."""
    body = json.dumps({**LONG, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield


def wait_until_live(server: Server, **expected: int) -> None:
    until = time.monotonic() + 20
    while not expected.items() <= (live := server.live()).items():
        assert time.monotonic() < until, f"{live}, not {expected}"
        time.sleep(0.05)


def test_a_seed_gives_the_same_text_alone_and_among_others(server: Server, source: str) -> None:
    asks: list[dict[str, Any]] = [
        {"prompt": source[: 400 * (n + 1)], "max_tokens": 30 + 10 * n, "temperature": 0.3 * n, "seed": n}
        for n in range(MAX_SEQUENCES)
    ]
    asks[1]["speculation"] = {"tiers": "target"}
    asks[2]["speculation"] = {"lookaheads": [5, 2]}
    alone = [server.complete(**ask).json()["choices"] for ask in asks]
    with ThreadPoolExecutor(len(asks)) as pool:
        together = list(pool.map(lambda ask: server.complete(**ask).json()["choices"], asks))
    assert together == alone


def test_one_request_too_many_is_told_when_to_come_back(server: Server) -> None:
    with ExitStack() as stack, TriForceClient(server.grpc_address, timeout_s=120, retries=1) as client:
        for index in range(MAX_SEQUENCES + MAX_QUEUED):
            stack.enter_context(silent_client(server, stream=index % 2 == 0))
        wait_until_live(server, gateway=MAX_SEQUENCES + MAX_QUEUED, target=MAX_SEQUENCES + MAX_QUEUED)
        for answer in (server.complete(max_tokens=1), server.stream(max_tokens=1)):
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert "8 places are taken" in answer.json()["error"]["message"]
        with pytest.raises(OverloadedError, match="places are taken"):
            client.generate("def", max_tokens=1)
        assert requests.get(f"{server.url}/health", timeout=10).status_code == 200
    server.wait_idle()
    assert server.complete(max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_its_request_in_every_tier(server: Server, stream: bool) -> None:
    with silent_client(server, stream=stream):
        wait_until_live(server, gateway=1, target=1, retrieval=1, draft=1)
    server.wait_idle(timeout_s=5)


def test_a_stream_that_is_closed_half_way_stops(server: Server) -> None:
    with server.stream(**LONG) as response:
        lines = response.iter_lines()
        assert next(lines).startswith(b"data: ")
        wait_until_live(server, gateway=1, target=1)
    server.wait_idle(timeout_s=5)


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_grpc_stream_that_is_closed_half_way_stops(server: Server, client: TriForceClient, how: str) -> None:
    stream = client.stream("def main():", max_tokens=6000)
    next(stream)
    wait_until_live(server, gateway=1, target=1)
    if how == "close":
        stream.close()
    del stream
    server.wait_idle(timeout_s=5)


def test_the_deadline_of_a_grpc_call_stops_its_request(server: Server) -> None:
    """The request itself has no `timeout_s`: the proxy cancels it at the deadline of the call."""
    request = pb.GenerateRequest(text="def main():", max_tokens=6000)
    with grpc.insecure_channel(server.grpc_address) as channel:
        stub = GenerationStub(channel)
        for call in (stub.Generate, lambda *args, **named: list(stub.GenerateStream(*args, **named))):
            with pytest.raises(grpc.RpcError) as late:
                call(request, timeout=0.5)
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            server.wait_idle(timeout_s=5)


def test_a_request_ends_with_its_time(server: Server, client: TriForceClient) -> None:
    answer = server.complete(**LONG, timeout_s=0.3)
    assert answer.status_code == 504
    assert answer.json()["error"] == {
        "message": "the request was not done within 0.3 s",
        "type": "timeout_error",
        "param": None,
        "code": "timeout",
    }
    events = [line for line in server.stream(**LONG, timeout_s=1).iter_lines() if line]
    assert json.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "timeout"
    with pytest.raises(DeadlineExceededError):
        client.generate("def main():", max_tokens=6000, timeout_s=0.3)
    server.wait_idle(timeout_s=5)
