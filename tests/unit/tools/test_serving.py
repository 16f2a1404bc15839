"""The parts of `triforce bench serve`: what it makes of given arrivals, whom it asks, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.command_line import Refusals
from tests.generation import Generation, Served
from triforce_core.client.errors import AuthenticationError
from triforce_core.errors import InvalidValueError
from triforce_tools.serving.doors import Answer, Question, open_server
from triforce_tools.serving.shared import tokens_per_s
from triforce_tools.serving.streams import Turn, row_of


def test_figures_of_an_answer() -> None:
    """By hand: 6 tokens after the first chunk's one, in 3 s; the wait for the second chunk is not a gap."""
    answer = Answer(sent_s=1.0, arrivals=[(3.0, 1), (4.5, 2), (5.0, 3), (6.0, 1)], num_tokens=7)
    assert answer.first_text_s == 2
    assert answer.ms_per_token == 500
    assert answer.longest_gap_ms() == 1000
    assert answer.longest_gap_ms(since_s=4.9) == 1000
    answer.arrivals.append((6.5, 1))
    assert answer.longest_gap_ms(since_s=6.0) == 500, "of those that end after that moment"


def test_rows_are_medians() -> None:
    turns = [Turn(10, 100, 5), Turn(30, 300, 50), Turn(60, 200, 7)]
    assert row_of(("http", "plain", "long-prompts"), turns) == {
        "door": "http",
        "mode": "plain",
        "beside": "long-prompts",
        "ms_per_token": 30,
        "longest_gap_ms": 200,
        "short_prompt_first_text_ms": 7,
    }


def test_tokens_of_all_answers_count_from_when_the_last_began() -> None:
    """By hand: from 3 to 7 s, 2 + 4 tokens of one answer and 6 of the other."""
    first = Answer(arrivals=[(1.0, 1), (2.0, 9), (4.0, 2), (5.0, 4)])
    assert tokens_per_s([first, Answer(arrivals=[(3.0, 1), (7.0, 6)])]) == 3


class StatusServer(ThreadingHTTPServer):
    """Tells a status, and notes the keys that it gets."""

    def __init__(self, targets: int) -> None:
        super().__init__(("127.0.0.1", 0), StatusHandler)
        tiers = [{"tier": "target", "address": "127.0.0.1:1"}] * targets + [{"tier": "retrieval"}]
        self.status = json.dumps({"target": {"model": "told"}, "tiers": tiers}).encode()
        self.authorizations: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class StatusHandler(BaseHTTPRequestHandler):
    server: StatusServer

    def do_GET(self) -> None:
        self.server.authorizations.append(self.headers["authorization"])
        self.send_response(200 if self.path == "/status" else 404)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(self.server.status)

    def log_message(self, *of: Any) -> None:
        """Say nothing."""


@pytest.fixture
def status_server(request: pytest.FixtureRequest) -> Iterator[StatusServer]:
    with StatusServer(request.param) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("status_server", [1], indirect=True)
def test_doors_send_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch, status_server: StatusServer) -> None:
    served = Served(Generation(keys=("sk-1",)))

    async def ask() -> Answer:
        async with open_server(f"{status_server.url}/v1/", served.address) as server:
            assert (server.model, server.lookaheads) == ("told", (8, 0)), "the tiers that the server has"
            answer = Answer()
            await server.doors["grpc"](Question((1, 2), 5, seed=3), answer)
            return answer

    try:
        monkeypatch.setenv("TRIFORCE_API_KEY", "sk-2")
        with pytest.raises(AuthenticationError):
            asyncio.run(ask())
        monkeypatch.setenv("TRIFORCE_API_KEY", "sk-1")
        answer = asyncio.run(ask())
    finally:
        served.die()
    assert status_server.authorizations == ["Bearer sk-2", "Bearer sk-1"]
    assert answer.num_tokens == len(answer.tokens) == len(answer.arrivals) == 5
    (request,) = served.generation.requests
    assert (request.seed, request.ignore_eos, list(request.token_ids.values)) == (3, True, [1, 2])


@pytest.mark.parametrize("status_server", [0, 2], indirect=True)
def test_a_server_without_one_replica_is_refused(status_server: StatusServer) -> None:
    async def ask() -> None:
        async with open_server(status_server.url, "127.0.0.1:1"):
            pytest.fail("it was taken")

    with pytest.raises(InvalidValueError, match=r"url: .* must be a server of one replica; it has [02] targets"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), ["http://127.0.0.1:1: Connection error"]),
        (("--url", "127.0.0.1:8000"), ["127.0.0.1:8000"]),
        (("--url", "http://[a"), ["http://[a"]),
        (("--context", "1"), ["context", "1", "must be at least 64"]),
        (("--output", "2"), ["output", "2", "must be at least 16"]),
        (("--streams", "0"), ["streams", "0", "must be at least 1"]),
        (("--repeats", "0"), ["repeats", "0", "must be at least 1"]),
        (("--temperature", "-1"), ["temperature", "-1.0", "must be at least 0"]),
        (("--beside", "noise"), ["beside", "'noise'", "must be one of bodies, long-prompts"]),
        (("--beside", "bodies", "--shared-document"), ["beside", "bodies", "excludes --shared-document"]),
    ],
)
def test_what_fails_is_said_in_one_line(refusals: Refusals, options: tuple[str, ...], named: list[str]) -> None:
    refusals.check(named, "bench", "serve", "--url", "http://127.0.0.1:1", *options)


def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    monkeypatch.setenv("TRIFORCE_API_KEY", "schlüssel")
    refusals.check(["triforce: api_key: must be printable ASCII characters"], "bench", "serve")
