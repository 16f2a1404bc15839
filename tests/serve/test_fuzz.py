"""Random input to the gRPC services and to HTTP of a real server, which refuses it by name and goes on serving.

`FUZZ_INPUTS` in the environment says how many of each; by default 600.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import requests as http_requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.conftest import Server
from tests.unit.deploy.test_grpc_fuzz import METHODS, STATUSES, requests
from triforce_core.client import TriForceClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

INPUTS = int(os.environ.get("FUZZ_INPUTS", "600"))
STALL_S = 1.0  # most seconds in which nobody else is answered


@contextmanager
def never_stalling(server: Server) -> Iterator[None]:
    """Inside the context others are answered all the time."""
    over = threading.Event()

    def ask() -> list[float]:
        times = []
        while not over.wait(0.05):
            began = time.monotonic()
            assert http_requests.get(f"{server.url}/ready", timeout=30).status_code in (200, 503)
            times.append(time.monotonic() - began)
        return times

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            over.set()
        times = asking.result()
    print(f"\n{len(times)} others were answered, the slowest after {max(times):.2f} s")
    assert len(times) > 10
    assert max(times) < STALL_S


def test_the_live_server_survives_grpc_messages(server: Server, client: TriForceClient) -> None:
    """It also gets bytes that are no message."""
    seen: Counter[str] = Counter()
    with grpc.insecure_channel(server.grpc_address) as channel, never_stalling(server):

        @settings(max_examples=INPUTS, deadline=None, suppress_health_check=list(HealthCheck))
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


PATHS = re.findall(
    r"\S+",
    """
    /v1/completions /v1/chat/completions /v1/messages /v1/messages/count_tokens /v1/responses /tokenize /detokenize
    /v1/models /health /ready /status /metrics /version / /docs /-/healthz /-/routes /v1 /v1/completions/
    /../etc/passwd /%00 /%ff%fe // /v1/models/x?y=%
""",
)
FIELDS = re.findall(
    r"\S+",
    """
    model prompt messages input tokens stream stream_options temperature top_p top_k n seed stop logprobs echo best_of
    logit_bias tools tool_choice response_format system instructions thinking reasoning json_schema regex speculation
    priority cache_salt user resume_token_ids metadata text min_tokens add_special_tokens previous_response_id store
""",
)
HEADERS = re.findall(
    r"\S+",
    """
    content-type accept accept-encoding authorization x-api-key x-request-id traceparent range expect te origin cookie
    anthropic-version x-triforce-peer x-b forwarded
""",
)
METHOD = ["POST"] * 6 + ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "QUERY"]


def value(chance: random.Random, depth: int = 0) -> Any:
    """Some JSON."""
    simple = [None, True, False, 0, 1, -1, 2**63, 1e308, 0.5, "", "a", "def f():", "\ud800", "x" * 1000, "auto", "user"]
    if depth > 3 or chance.random() < 0.7:
        return chance.choice([*simple, [5, 6, 7], chance.randrange(300)])
    if chance.random() < 0.5:
        return [value(chance, depth + 1) for _ in range(chance.randrange(4))]
    names = ["role", "content", "type", "name", "function", "parameters", "text", "properties", "$ref", *FIELDS]
    return {chance.choice(names): value(chance, depth + 1) for _ in range(chance.randrange(5))}


CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
SOUND: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def f():", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2, "store": False},
    "/tokenize": {"prompt": "def f():"},
    "/detokenize": {"tokens": [5, 6]},
}


def body(chance: random.Random, path: str) -> bytes:
    """A sound body with some fields changed, or bytes that are none."""
    sound = SOUND.get(path, {})
    fields = sound | {chance.choice([*sound, *FIELDS]): value(chance) for _ in range(chance.randrange(4))}
    # The point is not to decode.
    fields |= {name: chance.choice([2, 0, -1, "2"]) for name in sound if "max" in name and chance.random() < 0.1}
    fields |= {"n": chance.randrange(3)} if "n" in fields else {}
    text = json.dumps(fields).encode()
    match chance.randrange(8):
        case 0:
            return chance.randbytes(chance.randrange(200))
        case 1:
            return text[: chance.randrange(len(text))]
        case 2:
            where = chance.randrange(len(text))
            return text[:where] + chance.randbytes(3) + text[where + 3 :]
    return text


def headers(chance: random.Random) -> dict[str, str | bytes]:
    found: dict[str, str | bytes] = {"content-type": "application/json"}
    odd = ["", "a", "0", "-1", "\xff\xfe", "a" * 3000, "*/*", "gzip", "text/plain", "chunked, x", "Bearer", "bytes=0-"]
    for _ in range(chance.randrange(4)):
        found[chance.choice(HEADERS)] = chance.choice(odd).encode("latin-1")
    return found


def test_the_live_server_survives_http_requests(server: Server, client: TriForceClient) -> None:
    chance, seen = random.Random(5), Counter[int]()
    with never_stalling(server):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        for _ in range(INPUTS):
            method = chance.choice(METHOD)
            path, given_headers = chance.choice(PATHS), headers(chance)
            sent = body(chance, path)
            asked = f"{method} {path} {given_headers} {sent!r}"
            try:
                connection.request(method, path, sent, given_headers)  # type: ignore[arg-type]
                answer = connection.getresponse()
                read = answer.read()
            except TimeoutError:
                pytest.fail(f"no answer to {asked}")
            except (http.client.HTTPException, OSError):
                # Such as the front's refusal of a malformed header while the body was still on its way.
                connection.close()
                seen[0] += 1
                continue
            assert answer.status < 500 or answer.status in (503, 504), f"{asked}: {answer.status} {read[:500]!r}"
            seen[answer.status] += 1
    print(f"\n{dict(seen)}")
    assert seen[200] > INPUTS / 50
    assert seen[400] > INPUTS / 10
    assert seen[0] < INPUTS / 50
    server.wait_idle()
    assert client.generate("def main():", max_tokens=4, seed=1).usage.completion_tokens == 4
