"""`triforce bench serve` against a small OpenAI-compatible server over real sockets, whose timing is known."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web

from tests.command_line import Refusals, run
from tests.generation import Failure, Generation, Served
from triforce_tools.load.prompts import HEAD_WORDS

FIRST_S, GAP_S, CHUNKS = 0.03, 0.02, 5


@dataclass
class TimedServer:
    """Sends the first of `CHUNKS` chunks after `FIRST_S`, and the others every `GAP_S`. A word is one and a half of its
    tokens. Of the requests after the first, which measures the tokens, `troubles` have troubles instead of an answer.
    """

    troubles: dict[int, str] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    connections: set[object] = field(default_factory=set)
    authorizations: set[str | None] = field(default_factory=set)
    target: str = ""  # the address that /status tells
    tokenized: list[int] = field(default_factory=list)  # words of each prompt

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self.models), web.post("/v1/completions", self.complete)])
        app.add_routes([web.get("/status", self.status), web.post("/tokenize", self.tokenize)])
        return app

    async def models(self, request: web.Request) -> web.Response:
        self.authorizations.add(request.headers.get("authorization"))
        return web.json_response({"object": "list", "data": [{"id": "timed"}, {"id": "other"}]})

    async def status(self, request: web.Request) -> web.Response:
        self.authorizations.add(request.headers.get("authorization"))
        if not self.target:
            return web.json_response({"error": {"message": "is starting"}}, status=503)
        return web.json_response({"tiers": [{"tier": "target", "address": self.target}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        self.authorizations.add(request.headers.get("authorization"))
        self.tokenized.append(len((await request.json())["prompt"].split()))
        return web.json_response({"tokens": list(range(self.tokenized[-1] * 3 // 2))})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.connections.add(request.transport)
        self.authorizations.add(request.headers.get("authorization"))
        body = await request.json()
        self.bodies.append(body)
        trouble = self.troubles.get(len(self.bodies) - 1)
        if trouble is not None and trouble.isdecimal():
            return web.json_response({"error": {"message": f"trouble {trouble}"}}, status=int(trouble))
        if trouble == "late":
            await asyncio.sleep(2)
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        usage = {"prompt_tokens": len(body["prompt"].split()) * 3 // 2, "completion_tokens": 2 * CHUNKS}
        await stream.write(b": a comment\n\n")
        await asyncio.sleep(FIRST_S)
        for index in range(CHUNKS):
            if index:
                await asyncio.sleep(GAP_S)
            if index == 2 and trouble == "cut":
                return stream
            if index == 2 and trouble == "event":
                await self.event(stream, {"error": {"message": "gone", "code": "unavailable"}})
                return stream
            if index == 2 and trouble == "nonsense":
                await self.event(stream, {"choices": 5})
                return stream
            if index == 2 and trouble == "drop":
                assert request.transport is not None
                request.transport.abort()
                return stream
            await self.event(stream, {"choices": [{"text": "two tokens", "index": 0}], "usage": None})
        await self.event(stream, {"choices": [{"text": "", "finish_reason": "length"}]})
        await self.event(stream, {"choices": [], "usage": usage})
        await stream.write(b"data: [DONE]\n\n")
        return stream

    async def event(self, stream: web.StreamResponse, content: dict[str, Any]) -> None:
        await stream.write(b"data: " + json.dumps(content).encode() + b"\n\n")


@pytest.fixture
def timed() -> TimedServer:
    return TimedServer()


@pytest.fixture
def url(timed: TimedServer) -> Iterator[str]:
    """The server in a thread of its own, as long as the test runs."""
    started: queue.Queue[tuple[asyncio.AbstractEventLoop, asyncio.Event, str]] = queue.Queue()

    async def serve() -> None:
        runner = web.AppRunner(timed.app(), shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        over = asyncio.Event()
        started.put((asyncio.get_running_loop(), over, f"http://127.0.0.1:{runner.addresses[0][1]}"))
        await over.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    loop, over, address = started.get(timeout=10)
    yield address
    loop.call_soon_threadsafe(over.set)
    thread.join(timeout=10)
    assert not thread.is_alive()


def measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str, *options: str
) -> dict[str, Any]:
    assert run(monkeypatch, "bench", "serve", "--url", url, "--json", *options) == 0
    figures: dict[str, Any] = json.loads(capsys.readouterr().out)
    return figures


LOAD = ("--rate", "50", "--requests", "12", "--input", "30:90", "--output", "10", "--seed", "3")


def test_latencies_and_tokens_are_those_of_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], timed: TimedServer, url: str
) -> None:
    goals = ("--slo-ttft-ms", str(1e3 * FIRST_S / 2), "--slo-itl-ms", "60000")
    figures = measured(monkeypatch, capsys, f"{url}/v1/", *LOAD, *goals)
    assert (figures["requests"], figures["answered"], figures["refused"], figures["errors"]) == (12, 12, 0, {})
    assert figures["ttft_ms"]["p50"] >= 1e3 * FIRST_S
    assert figures["e2e_ms"]["p50"] >= 1e3 * (FIRST_S + (CHUNKS - 1) * GAP_S)
    assert figures["itl_ms"]["max"] >= 1e3 * GAP_S / 2  # a chunk that is read late comes near to the next
    assert figures["tpot_ms"]["max"] <= 4 / 9 * figures["itl_ms"]["max"]  # ten tokens in five chunks
    assert figures["goodput"]["share"] == 0, "no first text comes so soon"
    assert figures["model"] == "timed"
    assert figures["tokens_per_word"] == 1.5
    assert figures["load"] == {"rate": 50.0, "requests": 12, "seed": 3, "input": "30:90", "output": "10"}
    assert "cpu" in figures
    sent = sorted(timed.bodies[1:], key=lambda body: body["seed"])
    assert figures["output_tokens"] == 120
    assert figures["input_tokens"] == sum(len(body["prompt"].split()) * 3 // 2 for body in sent)
    assert 12 * 29 <= figures["input_tokens"] <= 12 * 91
    assert all(
        {**body, "prompt": ""}
        == {
            "model": "timed",
            "prompt": "",
            "max_tokens": 10,
            "temperature": 1.0,
            "seed": 3 + index,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for index, body in enumerate(sent)
    )
    again = measured(monkeypatch, capsys, url, *LOAD)
    later = sorted(timed.bodies[14:], key=lambda body: body["seed"])
    rest, begin = (
        [[{**body, "prompt": body["prompt"].split()[part]} for body in bodies] for bodies in (sent, later)]
        for part in (slice(HEAD_WORDS, None), slice(HEAD_WORDS))
    )
    assert rest[0] == rest[1], "the same load"
    assert all(one["prompt"] != other["prompt"] for one in begin[0] for other in begin[1]), (
        "a server has kept no KV of it"
    )
    assert again["goodput"] is None


def test_the_key_of_the_environment_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], timed: TimedServer, url: str
) -> None:
    monkeypatch.delenv("TRIFORCE_API_KEY", raising=False)
    for key, sent in ((None, None), ("sk-1", "Bearer sk-1")):
        if key is not None:
            monkeypatch.setenv("TRIFORCE_API_KEY", key)
        timed.authorizations.clear()
        figures = measured(monkeypatch, capsys, url, "--concurrency", "1", "--requests", "2")
        assert figures["answered"] == 2
        assert timed.authorizations == {sent}


def test_the_key_of_the_environment_is_sent_over_grpc(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = Served(Generation(keys=("sk-1",)))
    try:
        load = ("bench", "serve", "--grpc", served.address, "--concurrency", "1", "--requests", "2", "--json")
        monkeypatch.setenv("TRIFORCE_API_KEY", "sk-2")
        assert run(monkeypatch, *load) == 2
        assert "the API key is missing or not valid" in capsys.readouterr().err
        monkeypatch.setenv("TRIFORCE_API_KEY", "sk-1")
        assert run(monkeypatch, *load) == 0
        assert json.loads(capsys.readouterr().out)["answered"] == 2
    finally:
        served.die()


@pytest.mark.parametrize("protocol", ["--url", "--grpc"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], protocol: str
) -> None:
    monkeypatch.setenv("TRIFORCE_API_KEY", "schlüssel")
    load = ("bench", "serve", protocol, "http://127.0.0.1:1", "--concurrency", "1", "--requests", "1")
    assert run(monkeypatch, *load) == 2
    assert capsys.readouterr() == ("", "triforce: api_key: must be printable ASCII characters\n")


def test_troubles_are_counted_by_kind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], timed: TimedServer, url: str
) -> None:
    kinds = ("429", "500", "cut", "429", "event", "nonsense", "drop", "500", "503")
    timed.troubles = dict(zip(count(1), kinds, strict=False))
    figures = measured(monkeypatch, capsys, url, *LOAD, "--slo-ttft-ms", "60000")
    assert (figures["requests"], figures["answered"], figures["refused"]) == (12, 3, 2)
    errors = figures["errors"]
    assert errors.pop("HTTP 500") == {"count": 2, "first": "trouble 500"}
    assert errors.pop("HTTP 503") == {"count": 1, "first": "trouble 503"}
    assert errors.pop("error event: unavailable") == {"count": 1, "first": "gone"}
    assert errors.pop("cut off") == {"count": 1, "first": "the stream ended without data: [DONE]"}
    assert errors.pop("malformed answer")["count"] == 1
    ((kind, dropped),) = errors.items()  # aiohttp's name for a connection that breaks depends on the moment
    assert kind.endswith("Error")
    assert dropped["count"] == 1
    assert figures["goodput"]["share"] == 0.25
    assert figures["usage_stated"] == 3


def test_users_keep_their_connections(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], timed: TimedServer, url: str, tmp_path: Path
) -> None:
    path = tmp_path / "latencies.svg"
    options = ("--concurrency", "2", "--requests", "8", "--figure", str(path), "--model", "other")
    figures = measured(monkeypatch, capsys, url, *options, "--shared", "1", "--documents", "1")
    assert figures["answered"] == 8
    assert figures["seconds"] >= 4 * (FIRST_S + (CHUNKS - 1) * GAP_S)
    assert len(timed.connections) <= 3
    assert {body["model"] for body in timed.bodies} == {"other"}
    assert len({body["prompt"][:1000] for body in timed.bodies[1:]}) == 1
    assert len({body["prompt"] for body in timed.bodies[1:]}) == 8
    assert path.read_bytes().startswith(b"<?xml")
    assert "Traceback" not in capsys.readouterr().err


def test_a_traced_priority_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], timed: TimedServer, url: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"arrival_s": 0, "input_tokens": 30, "output_tokens": 7, "priority": 2}\n'
        '{"arrival_s": 0.2, "input_tokens": 60, "output_tokens": 8}\n'
    )
    figures = measured(monkeypatch, capsys, url, "--trace", str(trace))
    assert figures["load"] == {"seed": 0, "traced_requests": 2}
    assert figures["seconds"] >= 0.2 + FIRST_S + (CHUNKS - 1) * GAP_S
    sent = sorted(timed.bodies[1:], key=lambda body: body["seed"])
    assert [body.get("priority") for body in sent] == [2, None]
    assert [(len(body["prompt"].split()), body["max_tokens"]) for body in sent] == [(20, 7), (40, 8)]


def test_a_timeout_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], timed: TimedServer, url: str
) -> None:
    timed.troubles = {1: "late"}
    figures = measured(monkeypatch, capsys, url, "--concurrency", "1", "--requests", "2", "--timeout", "1")
    assert figures["errors"] == {"timeout": {"count": 1, "first": "no whole answer within 1 s"}}
    assert figures["answered"] == 1


def test_a_server_that_refuses_the_first_request_is_said_in_one_line(
    refusals: Refusals, timed: TimedServer, url: str
) -> None:
    timed.troubles = {0: "404"}
    refusals.check(
        [url, "did not answer one short request", "HTTP 404", "trouble 404"], "bench", "serve", "--url", url, *LOAD
    )


def test_a_grpc_stream_that_ends_early_is_no_answer(refusals: Refusals) -> None:
    served = Served(Generation(Failure(grpc.StatusCode.OK)))
    try:
        named = ["did not answer one short request", "cut off: the stream ended before its last chunk"]
        refusals.check(named, "bench", "serve", "--grpc", served.address, *LOAD)
    finally:
        served.die()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), ["ClientConnector", "127.0.0.1"]),
        (("--url", "127.0.0.1:8000"), ["url", "must be an address such as http://127.0.0.1:8000"]),
        (("--context", "1"), ["context", "must be at least 64"]),
    ],
)
def test_paths_says_in_one_line_what_fails(refusals: Refusals, options: tuple[str, ...], named: list[str]) -> None:
    refusals.check(named, "bench", "paths", "--url", "http://127.0.0.1:1", *options)


def test_paths_sends_the_key_to_all_of_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], timed: TimedServer, url: str
) -> None:
    monkeypatch.setenv("TRIFORCE_API_KEY", "sk-1")
    paths = ("bench", "paths", "--url", f"{url}/v1/", "--context", "64", "--output", "8")
    assert run(monkeypatch, *paths) == 2
    assert capsys.readouterr().err.startswith("triforce: HTTP 503: is starting")
    timed.target = "127.0.0.1:1"
    assert run(monkeypatch, *paths) == 2
    assert capsys.readouterr().err.startswith("reading the prompt\ntriforce: gRPC UNAVAILABLE: ")
    assert timed.authorizations == {"Bearer sk-1"}
    assert timed.tokenized == [64, 42], "words, of one and a half tokens each"
