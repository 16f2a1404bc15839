"""The spans of a real server with three tiers: of requests over HTTP and gRPC, and of the last before it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import requests

from tests.collector import Collected, Collector, collecting
from tests.serve.conftest import Server, free_ports, start, stop
from tests.starting import LocalRay, tried_twice
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1.generation_pb2_grpc import GenerationStub

CALLER = "b7ad6b7169203331"
CALLERS = [f"00-{digit * 32}-{CALLER}-01" for digit in "ab"]
PROMPT = "def area(width, height):\n    return"
TOKENS = 48


@contextmanager
def traced(folder: Path) -> Iterator[tuple[Server, Collector]]:
    """A server and its collector, which gets all spans when the server ends: it is told to keep them so long."""
    config, log = folder / "config.yaml", folder / "log.txt"
    port, grpc_port = free_ports(2)
    config.write_text(f"dtype: float32\nserver: {{port: {port}, grpc_port: {grpc_port}}}\n")
    with collecting() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_SERVICE_NAME", "demo-server")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
        running = Server(port, grpc_port, tried_twice(lambda: start(config, log)))
        yield running, collector
        assert not collector.bodies
        stop(running, log)  # with a stream in flight
        assert "Traceback" not in log.read_text(), log.read_text()


def checked(root: Collected, prompt_tokens: int) -> None:
    """Three tiers took part, and their times lie within the request's."""
    assert root.resource["service.name"] == "demo-server"
    assert root.span.parent_span_id.hex() == CALLER
    assert root.tree == {"queue": {}, "prefill": {}, "rounds": {"retrieval": {}, "draft": {}}}
    queue, prefill, rounds = (root.child(name) for name in ("queue", "prefill", "rounds"))
    retrieval, draft = rounds.child("retrieval"), rounds.child("draft")
    assert all(each.within(root) for each in (queue, prefill, rounds))
    assert all(each.within(rounds) for each in (retrieval, draft))
    assert 0 < prefill.seconds + rounds.seconds <= root.seconds
    assert min(each.attributes["triforce.passes"] for each in (rounds, retrieval, draft)) > 0
    assert min(each.seconds for each in (rounds, retrieval, draft)) > 0
    assert rounds.attributes["triforce.tokens"] == TOKENS - 1  # the first comes from the prompt's last pass
    assert root.attributes["gen_ai.usage.output_tokens"] == TOKENS
    assert root.attributes["gen_ai.usage.input_tokens"] == prompt_tokens
    assert prefill.attributes["triforce.prompt_tokens"] == prompt_tokens


@pytest.mark.ci  # a server of its own; tests/unit/deploy/test_tracing.py has what spans say
def test_requests_over_http_and_grpc_and_the_last_of_all(tmp_path: Path, local_ray: LocalRay) -> None:
    local_ray.end()
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "speculation": {"lookaheads": [6, 2]}}
    lookaheads = gen.Lookaheads(values=[6, 2])
    request = gen.GenerateRequest(text=PROMPT, max_tokens=TOKENS, ignore_eos=True, lookaheads=lookaheads)
    with traced(tmp_path) as (server, collector):
        headers = {"content-type": "application/json", "traceparent": CALLERS[0], "x-request-id": "over HTTP"}
        answer = requests.post(f"{server.url}/v1/completions", data=json.dumps(body), headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        with grpc.insecure_channel(server.grpc_address) as channel:
            metadata = [("traceparent", CALLERS[1]), ("x-request-id", "over gRPC"), ("application", "triforce")]
            list(GenerationStub(channel).GenerateStream(request, metadata=metadata, timeout=120))
    roots = collector.roots
    over_http, over_grpc = (next(each for each in roots if each.span.trace_id.hex() == digit * 32) for digit in "ab")
    for root in (over_http, over_grpc):
        checked(root, said["usage"]["prompt_tokens"])
    assert over_http.name == "POST /v1/completions"
    assert over_http.attributes["triforce.request_id"] == "over HTTP"
    mean = over_http.child("rounds").attributes["triforce.tokens_per_round"]
    assert mean == pytest.approx(said["triforce"]["tokens_per_round"])
    assert over_grpc.name == "triforce.v1.Generation/GenerateStream"
    assert over_grpc.attributes["triforce.request_id"] == "over gRPC"
    last = max((each for each in roots if each.children), key=lambda each: each.span.end_time_unix_nano)
    assert last.attributes["gen_ai.usage.output_tokens"] == 300  # the stream that was in flight when the server ended
