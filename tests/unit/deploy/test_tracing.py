"""The spans of calls over a scripted pipeline whose figures are known, as a collector gets them."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.semconv import attributes as stable
from opentelemetry.semconv._incubating import attributes as incubating
from starlette.testclient import TestClient

from deploy import journal, service, tracing
from deploy.checks import CHECKS
from deploy.errors import OverloadedError
from deploy.gateway import Gateway
from deploy.keys import keys_of
from deploy.openai_api.guard import guarded
from deploy.openai_api.routes import http_app
from deploy.service import Service
from deploy.tracing import exporter, exporters
from scripts.trace_figure import drawn, rows, spans
from tests.collector import ERROR, SERVER, Collected, Collector, collecting
from tests.command_line import Refusals
from tests.packages import REPOSITORY
from tests.scripted import WithoutTiers, ids, model
from tests.unit.deploy.test_keys import Context, called
from triforce_core import __version__, resuming
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import load_settings
from triforce_core.errors import InvalidValueError, UnavailableError

PROMPT, OUTPUT = "def quicksort(numbers):", "    return partition(numbers, 77)"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT, UNSAMPLED = f"00-{TRACE}-{CALLER}-01", f"00-{TRACE}-{CALLER}-00"
TALLIES = [
    pb.Tally(rounds=3, proposed=9, accepted=7, rejected=2, passes=4, busy_s=0.05),
    pb.Tally(rounds=8, proposed=20, accepted=12, rejected=6, passes=8, busy_s=0.03),
    pb.Tally(passes=20, busy_s=0.01),
]
STATS = pb.DecodeStats(
    queued_s=0.02,
    prefill_s=0.04,
    decode_s=0.10,
    decoded=11,
    snapshots=2,
    preempted=1,
    tallies=TALLIES,
    direct=pb.Tally(rounds=1, proposed=2, accepted=1),
    plans={"both": 2, "draft": 1},
)
REACHED = pb.DecodeEvent(fingerprint="fp_1")
ENTERED = pb.DecodeEvent(entered=True, cached_tokens=3)
GONE = UnavailableError("the replica that served the request is gone")


def text(tokens: list[int]) -> pb.DecodeEvent:
    return pb.DecodeEvent(token_ids=tokens, origins=bytes(len(tokens)))


LAST = pb.DecodeEvent(finish_reason=gen.FINISH_REASON_LENGTH, stats=STATS)
WHOLE = (REACHED, ENTERED, 0.17, text(ids(OUTPUT)), LAST)  # the pause is as long as the figures say


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.url)
        yield made


class Served:
    """A gateway without Ray. `script`: as for `Scripted`, or a pipeline."""

    def __init__(self, *script: Any) -> None:
        pipelines = script[0] if hasattr(script[0], "decode") else WithoutTiers(*script)
        self.service = Service(load_settings(), model(), pipelines)
        self.gateway = Gateway.__new__(Gateway)
        self.gateway.service, self.gateway.keys = self.service, keys_of(None)
        self.http = TestClient(
            guarded(http_app(self.service), self.service, self.gateway.keys), raise_server_exceptions=False
        )

    def ask(self, path: str = "/v1/completions", *, traceparent: str = "", **fields: Any) -> Any:
        headers = {"traceparent": traceparent, "x-request-id": "mine"} if traceparent else {}
        return self.http.post(path, json={"prompt": PROMPT, **fields}, headers=headers)

    def flushed(self) -> None:
        assert self.service.tracing is not None
        self.service.tracing.flush()


def only(collector: Collector, served: Served) -> Collected:
    served.flushed()
    [found] = collector.roots
    return found


# -- what a trace has --------------------------------------------------------------------------------------------------


def test_a_completion_is_one_tree_below_the_client_s_span(collector: Collector) -> None:
    served = Served(*WHOLE)
    before = time.time_ns()
    assert served.ask(traceparent=TRACEPARENT).status_code == 200
    after = time.time_ns()
    root = only(collector, served)
    assert (root.name, root.span.kind) == ("POST /v1/completions", SERVER)
    assert (root.span.trace_id.hex(), root.span.parent_span_id.hex()) == (TRACE, CALLER)
    assert root.tree == {"queue": {}, "prefill": {}, "rounds": {"retrieval": {}, "draft": {}}}
    assert before <= root.span.start_time_unix_nano <= root.span.end_time_unix_nano <= after
    assert root.resource["service.name"] == "triforce"
    assert root.resource["service.version"] == __version__
    found = root.attributes
    assert 0.17 <= found.pop("gen_ai.response.time_to_first_chunk") <= root.seconds
    assert found == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "triforce",
        "gen_ai.request.model": "demo",
        "gen_ai.response.model": "demo",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": len(ids(PROMPT)),
        "gen_ai.usage.output_tokens": len(ids(OUTPUT)),
        "gen_ai.usage.cache_read.input_tokens": 3,
        "triforce.engines_lost": 0,
        "triforce.request_id": "mine",
    }
    assert root.span.status.code != ERROR


def test_the_phases_have_the_engine_s_times_and_figures(collector: Collector) -> None:
    served = Served(*WHOLE)
    served.ask()
    root = only(collector, served)
    queue, prefill, rounds = (root.child(name) for name in ("queue", "prefill", "rounds"))
    retrieval, draft = rounds.child("retrieval"), rounds.child("draft")
    spans = {"queue": 0.02, "prefill": 0.04, "rounds": 0.10, "retrieval": 0.03, "draft": 0.01}
    for each in (queue, prefill, rounds, retrieval, draft):
        assert each.seconds == pytest.approx(spans[each.name], abs=1e-6)
        assert each.within(root)
    assert sum(each.seconds for each in (queue, prefill, rounds)) <= root.seconds
    for one, other in ((queue, prefill), (prefill, rounds)):
        assert abs(one.span.end_time_unix_nano - other.span.start_time_unix_nano) < 1000
    assert retrieval.within(rounds)
    assert draft.within(rounds)
    assert queue.attributes == {"triforce.preempted": 1}
    assert prefill.attributes == {"triforce.prompt_tokens": len(ids(PROMPT)), "triforce.cached_tokens": 3}
    found = rounds.attributes
    assert found.pop("triforce.tokens_per_round") == pytest.approx(11 / 3)
    assert found == {
        "triforce.tokens": 11,
        "triforce.rounds": 3,
        "triforce.rounds.both": 2,
        "triforce.rounds.draft": 1,
        "triforce.proposed": 9,
        "triforce.accepted": 7,
        "triforce.passes": 4,
        "triforce.pass_seconds": 0.05,
        "triforce.snapshots": 2,
    }
    # Of what a tier drafted, and not of what it judged: one round took the drafter's tokens straight to the target.
    judged = ("triforce.proposed", "triforce.accepted", "triforce.passes", "triforce.pass_seconds")
    assert [retrieval.attributes[name] for name in judged] == [7, 6, 8, 0.03]
    assert [draft.attributes[name] for name in judged] == [22, 13, 20, 0.01]


def test_phases_longer_than_the_call_end_with_it(collector: Collector) -> None:
    """The clocks of two machines may differ a little: no child ends after its parent."""
    served = Served(REACHED, text(ids(OUTPUT)), LAST)  # without the pause
    served.ask()
    root = only(collector, served)
    assert all(each.within(root) for each in (*root.children, *root.child("rounds").children))


def test_each_completion_of_a_call_has_its_phases(collector: Collector) -> None:
    served = Served(*WHOLE)
    assert served.ask(n=2).status_code == 200
    root = only(collector, served)
    assert root.attributes["gen_ai.request.choice.count"] == 2
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    rounds = [each for each in root.children if each.name == "rounds"]
    assert sorted(each.attributes["triforce.completion"] for each in rounds) == [0, 1]
    assert len(root.children) == 6


def test_where_nothing_drafts_there_are_no_spans_of_the_tiers_below(collector: Collector) -> None:
    tallies = [pb.Tally(rounds=2, passes=2, busy_s=0.02), pb.Tally(), pb.Tally()]
    stats = pb.DecodeStats(prefill_s=0.01, decode_s=0.02, decoded=2, tallies=tallies)
    served = Served(REACHED, text(ids("a b")), pb.DecodeEvent(finish_reason=gen.FINISH_REASON_STOP, stats=stats))
    served.ask()
    assert only(collector, served).tree == {"queue": {}, "prefill": {}, "rounds": {}}


def test_a_chat_and_a_path_with_a_name_are_named_by_their_routes(collector: Collector) -> None:
    served = Served(*WHOLE)
    served.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": PROMPT}]})
    served.http.get("/v1/models/secret-name")
    served.http.get("/nowhere/at/all")
    served.http.get("/ready")  # a probe that succeeds is not logged, and has no span
    served.flushed()
    chat, model_card, nowhere = collector.roots
    assert chat.name == "POST /v1/chat/completions"
    assert chat.attributes["gen_ai.operation.name"] == "chat"
    assert model_card.name == "GET /v1/models/{name:path}"
    assert model_card.attributes["error.type"] == "404"
    assert nowhere.name == "GET"
    assert "gen_ai.operation.name" not in nowhere.attributes


def test_grpc_calls_have_spans_too(collector: Collector) -> None:
    served = Served(*WHOLE)
    request = gen.GenerateRequest(text=PROMPT)
    called(served.gateway, "GenerateStream", Context(traceparent=TRACEPARENT, x_request_id="mine"), request)
    called(served.gateway, "Generate", Context(), gen.GenerateRequest(text=PROMPT, model="other"))
    served.flushed()
    stream, refused = collector.roots
    assert (stream.name, stream.span.kind) == ("triforce.v1.Generation/GenerateStream", SERVER)
    assert (stream.span.trace_id.hex(), stream.span.parent_span_id.hex()) == (TRACE, CALLER)
    assert stream.tree == {"queue": {}, "prefill": {}, "rounds": {"retrieval": {}, "draft": {}}}
    found = stream.attributes
    assert (found["rpc.system.name"], found["rpc.method"]) == ("grpc", stream.name)
    assert (found["rpc.response.status_code"], found["triforce.request_id"]) == ("OK", "mine")
    assert found["gen_ai.usage.output_tokens"] == len(ids(OUTPUT))
    assert refused.attributes["rpc.response.status_code"] == "NOT_FOUND"
    assert refused.attributes["error.type"] == "model_not_found"
    assert refused.span.status.code != ERROR
    assert not refused.children


def test_the_documentation_s_picture_can_be_drawn_from_what_a_collector_writes(
    collector: Collector, tmp_path: Path
) -> None:
    served = Served(*WHOLE)
    served.http.get("/v1/models")
    served.ask()
    served.flushed()
    exports = [MessageToDict(ExportTraceServiceRequest.FromString(body)) for body in collector.bodies]
    file = tmp_path / "spans.jsonl"
    file.write_text("\n".join(map(json.dumps, exports)))
    shown = rows(list(spans(file)))
    assert [(depth, span.name) for depth, span in shown] == [
        (0, "POST /v1/completions"),
        (1, "queue"),
        (1, "prefill"),
        (1, "rounds"),
        (2, "retrieval"),
        (2, "draft"),
    ]
    picture = ElementTree.fromstring(drawn(shown))
    said = [each.text or "" for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "100 ms, 3 rounds, 11 tokens: 3.7 a round" in said
    assert "30 ms, 8 passes; 6 of 7 drafted tokens accepted" in said


# -- calls that fail ---------------------------------------------------------------------------------------------------


@pytest.fixture
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(journal, "MAX_DELAY_S", 0.01)


class Dying(WithoutTiers):
    """The first attempt dies in the middle; the next ends."""

    def decode(self, request: pb.DecodeRequest) -> Any:
        first = not self.requests
        self.script = (REACHED, ENTERED, text(ids("a b")), GONE) if first else WHOLE
        return super().decode(request)


@pytest.mark.usefixtures("no_delays")
def test_an_engine_that_is_replaced_in_mid_stream_is_an_event(collector: Collector) -> None:
    served = Served(Dying())
    assert served.ask().status_code == 200
    root = only(collector, served)
    [event] = root.span.events
    assert event.name == "engine lost"
    assert {pair.key for pair in event.attributes} == {"error.type", "triforce.tokens"}
    assert [value.value.int_value for value in event.attributes if value.key == "triforce.tokens"] == [len(ids("a b"))]
    assert root.span.start_time_unix_nano <= event.time_unix_nano <= root.child("queue").span.start_time_unix_nano
    assert root.attributes["triforce.engines_lost"] == 1
    assert "error.type" not in root.attributes
    assert root.attributes["gen_ai.usage.output_tokens"] == len(ids("a b")) + len(ids(OUTPUT))


@pytest.mark.usefixtures("no_delays")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "code", "serious"),
    [
        (RuntimeError(PROMPT), "internal_error", True),
        (GONE, "engine_crash", True),
        (OverloadedError("full"), "overloaded", False),
    ],
)
def test_a_call_that_fails_says_so(
    collector: Collector, failure: Exception, code: str, serious: bool, stream: bool
) -> None:
    served = Served(REACHED, ENTERED, text(ids(OUTPUT)), failure)
    served.ask(stream=stream, timeout_s=5)
    root = only(collector, served)
    assert root.attributes["error.type"] == code
    assert (root.span.status.code == ERROR) == (serious or stream)  # what breaks a stream off is the server's
    assert root.span.status.message == ""
    assert not root.children
    assert "gen_ai.response.finish_reasons" not in root.attributes


def test_a_mistake_of_the_client_is_no_error_of_the_server(collector: Collector) -> None:
    served = Served(*WHOLE)
    assert served.ask(max_tokens=0).status_code == 400
    assert served.ask(temperature="hot").status_code == 400
    served.flushed()
    wrong_value, wrong_form = collector.roots
    assert wrong_value.attributes["error.type"] == "invalid_value"
    assert wrong_form.attributes["error.type"] == "400"
    assert {each.span.status.code for each in (wrong_value, wrong_form)} == {0}


def test_a_client_that_goes_away_is_cancelled(collector: Collector) -> None:
    served = Served(REACHED, ENTERED, text(ids("a")), 0.05, text(ids("b")), 0.05, LAST)

    async def going() -> None:
        chunks = served.gateway.GenerateStream(gen.GenerateRequest(text=PROMPT), grpc_context=Context())
        await anext(chunks)
        await chunks.aclose()

    asyncio.run(going())
    root = only(collector, served)
    assert root.attributes["error.type"] == "cancelled"
    assert root.attributes["rpc.response.status_code"] == "CANCELLED"
    assert root.span.status.code != ERROR


def test_no_text_is_in_any_span(collector: Collector) -> None:
    served = Served(*WHOLE)
    served.ask()
    served.ask(temperature=PROMPT)
    served.http.post("/v1/chat/completions", json={"messages": [{"role": PROMPT, "content": PROMPT}]})
    failing = Served(REACHED, text(ids(OUTPUT)), RuntimeError(PROMPT))
    failing.ask(stream=True, stop=["partition"])
    for each in (served, failing):
        each.flushed()
    sent = b"".join(collector.bodies)
    assert len(collector.roots) == 4
    assert b"/v1/chat/completions" in sent
    for word in ("quicksort", "partition", "numbers"):
        assert word.encode() not in sent


# -- which calls are traced, and where to ------------------------------------------------------------------------------


def test_a_client_s_sampling_is_kept(collector: Collector) -> None:
    served = Served(*WHOLE)
    served.ask(traceparent=UNSAMPLED)
    served.ask(traceparent=TRACEPARENT)
    assert only(collector, served).span.parent_span_id.hex() == CALLER


def test_the_sampler_is_that_of_the_environment(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    off = Served(*WHOLE)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    on = Served(*WHOLE)
    off.ask(traceparent=TRACEPARENT)
    on.ask(traceparent=UNSAMPLED)
    for each in (off, on):
        each.flushed()
    [root] = collector.roots
    assert root.resource["service.name"] == "ours"


def test_a_broken_traceparent_begins_a_trace(collector: Collector) -> None:
    served = Served(*WHOLE)
    assert served.ask(traceparent="00-nonsense").status_code == 200
    root = only(collector, served)
    assert root.span.parent_span_id == b""
    assert root.tree


def test_tracestate_comes_along_from_all_its_headers(collector: Collector) -> None:
    served = Served(*WHOLE)
    headers = [("traceparent", TRACEPARENT), ("tracestate", "a=1"), ("tracestate", "b=2")]
    served.http.post("/v1/completions", json={"prompt": PROMPT}, headers=headers)
    root = only(collector, served)
    assert {root.span.trace_state, root.child("rounds").span.trace_state} == {"a=1,b=2"}


def test_draining_sends_the_last_spans(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    served = Served(*WHOLE)
    served.ask()
    assert not collector.roots
    assert asyncio.run(served.service.drain(1.0))
    assert len(collector.roots) == 1


def test_a_collector_that_is_away_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(service, "FLUSH_S", 0.2)
    served = Served(*WHOLE)
    assert served.ask().status_code == 200
    began = time.monotonic()

    async def drained() -> float:
        assert await served.service.drain(1.0)
        return time.monotonic() - began

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.service.tracing, "flush", lambda: time.sleep(2))
        assert asyncio.run(drained()) < 1


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, []),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, ["otlp_proto_http"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h/t"}, ["otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ["otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "console, otlp"}, ["console", "otlp_proto_http"]),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["otlp_proto_grpc"]),
        (
            {
                "OTEL_TRACES_EXPORTER": "otlp",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            ["otlp_proto_http"],
        ),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, []),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, []),
    ],
)
def test_what_the_environment_asks_for(variables: dict[str, str], expected: list[str]) -> None:
    assert exporters(variables) == expected


def test_a_protocol_without_an_exporter_is_refused_by_its_variable() -> None:
    with pytest.raises(InvalidValueError, match="OTEL_EXPORTER_OTLP_PROTOCOL: 'http/json' is not supported"):
        exporters({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def test_an_exporter_that_is_missing_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    found: Callable[..., Any] = tracing.entry_points

    def without(group: str) -> list[EntryPoint]:
        return [each for each in found(group=group) if not each.name.startswith("otlp")]

    monkeypatch.setattr(tracing, "entry_points", without)
    with pytest.raises(InvalidValueError, match="pip install 'triforce-serve\\[tracing\\]'"):
        exporter("otlp_proto_http")
    with pytest.raises(InvalidValueError, match="pip install opentelemetry-exporter-otlp-proto-grpc"):
        exporter("otlp_proto_grpc")
    with pytest.raises(InvalidValueError, match=r"'jaeger' must be among \['console'\]"):
        exporter("jaeger")
    for name in set(CHECKS) - {"traces"}:
        monkeypatch.setitem(CHECKS, name, lambda settings: "")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    refusals.check(["OTEL_TRACES_EXPORTER", "pip install 'triforce-serve[tracing]'"], "serve")


OFF_AND_ON = """
import os, sys
from starlette.testclient import TestClient
from deploy.keys import keys_of
from deploy.openai_api.guard import guarded
from deploy.openai_api.routes import http_app
from deploy.service import Service
from tests.scripted import ENDED, WithoutTiers, model
from triforce_core.config import load_settings

def asked():
    service = Service(load_settings(), model(), WithoutTiers(ENDED))
    client = TestClient(guarded(http_app(service), service, keys_of(None)))
    status = client.post("/v1/completions", json={"prompt": "def"}).status_code
    print(status, any(name.startswith(("opentelemetry.sdk", "opentelemetry.exporter")) for name in sys.modules))

asked()
os.environ["OTEL_TRACES_EXPORTER"] = "otlp"
asked()
"""


@pytest.mark.ci  # ten seconds: most of them for torch
def test_without_the_variables_the_sdk_is_not_even_imported() -> None:
    """FastAPI imports OpenTelemetry's interface by itself, and Ray its SDK; a service without Ray has no SDK."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-c", OFF_AND_ON]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=REPOSITORY, env=variables, check=True
    )
    assert done.stdout.splitlines()[:2] == ["200 False", "200 True"]


def test_names_are_those_of_the_conventions(collector: Collector) -> None:
    """All names but our own, which begin with `triforce.`."""
    known = {
        value
        for package in (stable, incubating)
        for module in pkgutil.iter_modules(package.__path__)
        for value in vars(importlib.import_module(f"{package.__name__}.{module.name}")).values()
        if isinstance(value, str)
    }
    served = Served(*WHOLE)
    served.ask(n=2)
    served.ask(max_tokens=0)
    called(served.gateway, "Generate", Context(), gen.GenerateRequest(text=PROMPT))
    served.flushed()
    names = {name for root in collector.roots for name in (*root.attributes, *root.resource)}
    assert {name for name in names if not name.startswith("triforce.")} <= known
    assert "gen_ai.usage.input_tokens" in known
