"""Keys, shares, ids, limits and the log, over a scripted pipeline: HTTP and gRPC as the gateway guards them."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import traceback
from collections.abc import AsyncIterator, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from openai import AuthenticationError, OpenAI
from ray._common.utils import import_attr
from ray.serve._private.http_util import _apply_middlewares
from starlette.datastructures import Headers
from starlette.responses import StreamingResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from deploy import health
from deploy import keys as keys_module
from deploy.app import ENVIRONMENT
from deploy.client_request import ClientRequest
from deploy.errors import OverloadedError, UnauthenticatedError, traced
from deploy.fair_share import FairShare
from deploy.gateway import Gateway
from deploy.health import SERVICES, Health
from deploy.keys import ApiKeys, keys_of
from deploy.openai_api import guard
from deploy.openai_api.guard import OPEN_PATHS, guarded
from deploy.openai_api.routes import http_app
from deploy.page import FILES as PAGE
from deploy.service import Service
from tests.scripted import EOS, Scripted, WithoutTiers, event, ids, model
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import load_settings
from triforce_core.errors import InvalidValueError
from triforce_core.messages import GREEDY

ENDED = (event(ids("a b")), event([*ids(" c"), EOS], gen.FINISH_REASON_STOP))
PROMPT = "a prompt that nobody else should read"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# who may come in\nalice: alice-key\n\nbob: bob:key-1\nbob:\tbob-key-2\nnobody-key\n")
    return path


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of keys is read at every request."""
    monkeypatch.setattr(keys_module, "MOST_AGE_S", 0.0)


def gateway(file: Path | None, *script: pb.DecodeEvent | Exception | float, **server: Any) -> Gateway:
    made = Gateway.__new__(Gateway)  # without Ray
    settings = load_settings(server=server)
    made.service = Service(settings, model(), WithoutTiers(*script or ENDED))
    made.health = Health(made.service)
    made.keys = keys_of(None if file is None else str(file))
    return made


def http(made: Gateway) -> TestClient:
    return TestClient(made.__serve_build_asgi_app__(), raise_server_exceptions=False)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def basic(key: str, user: str = "") -> dict[str, str]:
    """The header of basic authentication, as RFC 7617 has it for UTF-8."""
    return {"authorization": f"Basic {base64.b64encode(f'{user}:{key}'.encode()).decode()}"}


def asked(client: TestClient, key: str = "alice-key", **headers: str) -> Any:
    return client.post("/v1/completions", json={"prompt": PROMPT}, headers={**bearer(key), **headers})


class Context:
    """What a method uses of Serve's gRPC context."""

    def __init__(self, **metadata: str) -> None:
        # Serve's proxy takes the client's `request_id`, if there is one; otherwise it makes one.
        self.trailing = [("request_id", metadata.pop("request_id", "by-serve"))]
        self.metadata = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        self.status: tuple[grpc.StatusCode, str] | None = None
        self.code: Any = None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:50000"

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self.metadata

    def trailing_metadata(self) -> list[tuple[str, str]]:
        return self.trailing

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None:
        self.trailing = self.trailing[:1] + metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.status = (self.code, details)


GENERATE = gen.GenerateRequest(text=PROMPT)
REQUESTS = {  # of methods that take another
    "Tokenize": gen.TokenizeRequest(text=PROMPT),
    "Detokenize": gen.DetokenizeRequest(token_ids=[1, 2]),
}


def called(made: Gateway, method: str, context: Context, request: Any = None) -> list[Any]:
    """The answers of a gRPC method."""

    async def run() -> list[Any]:
        answer = getattr(made, method)(request or REQUESTS.get(method, GENERATE), grpc_context=context)
        return [each async for each in answer] if isinstance(answer, AsyncIterator) else [await answer]

    return asyncio.run(run())


def lines_of(caplog: pytest.LogCaptureFixture) -> Iterator[dict[str, Any]]:
    for record in caplog.records:
        if record.getMessage().startswith("call {"):
            yield json.loads(record.getMessage().removeprefix("call "))


# The file


def test_keys_have_the_names_of_their_lines(file: Path) -> None:
    keys = ApiKeys(file)
    owners = {key: keys.owner(f"Bearer {key}") for key in ("alice-key", "bob:key-1", "bob-key-2", "nobody-key")}
    assert owners == {"alice-key": "alice", "bob:key-1": "bob", "bob-key-2": "bob", "nobody-key": "key-c1588d68"}
    assert keys.owner("bearer  alice-key ") == "alice"
    for wrong in (None, "", "Bearer", "Bearer ", "alice-key", "Basic alice-key", "Bearer alice", "Bearer alice-key2"):
        with pytest.raises(UnauthenticatedError) as refused:
            keys.owner(wrong)
        assert not wrong or "alice" not in str(refused.value)
    with pytest.raises(UnauthenticatedError):
        keys.owner("Bearer \udce9\xe9")


def test_a_key_may_be_the_password_of_basic_authentication(file: Path) -> None:
    keys = ApiKeys(file)
    for key, owner in (("alice-key", "alice"), ("bob:key-1", "bob")):  # a password may have colons, a name may not
        for user in ("", "anybody", "jos\xe9"):
            assert keys.owner(basic(key, user)["authorization"]) == owner
    without_colon = base64.b64encode(b"alice-key").decode()
    not_utf8 = base64.b64encode(b"\xff:alice-key").decode()
    swapped = basic("", "alice-key")["authorization"].removeprefix("Basic ")
    for wrong in (
        "",
        " ",
        "alice-key",
        without_colon,
        not_utf8,
        swapped,
        "Og=",
        "\xe9",
        "\udce9",
        basic("")["authorization"].removeprefix("Basic "),
    ):
        with pytest.raises(UnauthenticatedError):
            keys.owner(f"Basic {wrong}")


def test_a_key_without_a_name_keeps_its_name_when_other_lines_change(file: Path) -> None:
    before = ApiKeys(file).owner("Bearer nobody-key")
    file.write_text("other-key\nnobody-key\n")
    keys = ApiKeys(file)
    assert keys.owner("Bearer nobody-key") == before
    assert keys.owner("Bearer other-key") != before
    assert "nobody" not in before


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "must hold at least one key"),
        (b"# nothing\n\n", "must hold at least one key"),
        (b"good-key\nname: secret with blanks\n", "line 2 must be `key` or `name: key`"),
        (b"good-key\n\ngood-key\n", "line 3 must not repeat the key of another line"),
        ("clé".encode(), "line 1 must be"),
        (b"\xff\xfe", "must be a text file in UTF-8"),
    ],
)
def test_a_wrong_file_is_refused_at_start_by_field_and_rule(tmp_path: Path, content: bytes, rule: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(InvalidValueError, match=r"^server\.api_keys: ") as refused:
        keys_of(str(path))
    assert rule in str(refused.value)
    assert str(path) in str(refused.value)
    assert "secret" not in str(refused.value)
    with pytest.raises(InvalidValueError, match=r"^server.api_keys: .*cannot be read: No such file"):
        keys_of(str(tmp_path / "none"))


@pytest.mark.usefixtures("at_once")
def test_the_file_is_read_again(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = ApiKeys(file)
    file.write_text("carol: carol-key\n")
    assert keys.owner("Bearer carol-key") == "carol"
    with pytest.raises(UnauthenticatedError):
        keys.owner("Bearer alice-key")
    file.write_text("carol: carol key\n")  # a mistake
    for _ in range(3):
        assert keys.owner("Bearer carol-key") == "carol"
    assert caplog.text.count("the keys that it held before stay valid") == 1
    file.unlink()
    assert keys.owner("Bearer carol-key") == "carol"
    assert "cannot be read" in caplog.text
    file.write_text("# all are locked out\n")
    with pytest.raises(UnauthenticatedError):
        keys.owner("Bearer carol-key")
    assert "carol-key" not in caplog.text


def test_the_file_is_not_read_for_each_request(file: Path) -> None:
    keys = ApiKeys(file)
    file.unlink()
    file.mkdir()  # reading it would be logged as an error, and set the time
    read_at = keys.read_at
    assert keys.owner("Bearer alice-key") == "alice"
    assert keys.read_at == read_at
    assert keys_module.MOST_AGE_S <= 5


# HTTP


def test_without_a_key_no_route_answers_but_those_for_probes(file: Path) -> None:
    assert set(OPEN_PATHS) == {"/health", "/ready"}
    made = gateway(file)
    client = http(made)
    documented = http_app(made.service).openapi()["paths"]
    paths = ["/docs", "/openapi.json", *(path.replace("{name}", "demo") for path in documented)]
    paths += ["/", "/page/app.js", "/page/demo.py", "/page/none"]
    assert {"/v1/completions", "/v1/models", "/status", "/version", "/docs", "/openapi.json"} <= set(paths)
    for path in [*paths, "/v2", "/health/", "/%2e/health", "/HEALTH"]:
        for method in ("GET", "POST", "HEAD", "OPTIONS", "DELETE"):
            for headers in ({}, bearer("wrong"), basic("wrong"), {"authorization": "alice-key"}):
                answer = client.request(method, path, headers=headers, follow_redirects=False)
                if path in OPEN_PATHS:
                    assert answer.status_code in (200, 405)
                    continue
                assert answer.status_code == 401, (method, path)
                bearer_alone, for_browsers = answer.headers.get_list("www-authenticate")
                assert bearer_alone == "Bearer"
                assert for_browsers.startswith("Basic realm=")
                if method != "HEAD":
                    error = answer.json()["error"]
                    ours = ("invalid_request_error", "invalid_api_key")
                    theirs = ("authentication_error", None)  # on the paths of Anthropic's API
                    expected = theirs if path.startswith("/v1/messages") else ours
                    assert (error["type"], error.get("code")) == expected
    assert client.get("/health").json() == client.get("/ready").json() == {"status": "ok"}


def test_the_page_loads_with_a_key_and_nothing_beside_it(file: Path) -> None:
    """A browser asks for the key by itself, and sends it with every file and call."""
    client = http(gateway(file))
    client.headers.update(basic("alice-key"))
    page = client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    names = [each.relative_to(PAGE).as_posix() for each in PAGE.rglob("*") if each.is_file()]
    assert {"index.html", "app.js"} <= set(names)
    for name in (*names, "demo.py"):
        assert client.get(f"/page/{name}").status_code == 200, name
    for outside in ("/page/../app.py", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/page/none", "/page/", "/page"):
        assert client.get(outside).status_code == 404, outside


def test_another_site_cannot_use_the_key_that_a_browser_keeps(file: Path) -> None:
    """Browsers send a kept password with requests from any site's page. But such a page can choose only among these
    content types.
    """
    client = http(gateway(file))
    client.headers.update(basic("alice-key"))
    assert client.post("/v1/completions", json={"prompt": PROMPT}).status_code == 200
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            body = json.dumps({"prompt": PROMPT, "messages": [{"role": "user", "content": PROMPT}], "tokens": [1]})
            answer = client.post(path, content=body, headers={"content-type": kind} if kind else {})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body"), (path, kind)


def test_with_a_key_it_answers(file: Path) -> None:
    client = http(gateway(file))
    assert asked(client).status_code == asked(client, "bob-key-2").status_code == 200
    known, unknown = (
        OpenAI(base_url="http://testserver/v1", api_key=key, http_client=client, max_retries=0)
        for key in ("alice-key", "wrong")
    )
    assert [each.id for each in known.models.list()] == ["demo"]
    with pytest.raises(AuthenticationError) as refused:
        unknown.models.list()
    assert refused.value.code == "invalid_api_key"


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_two_keys_are_refused_whichever_is_right(file: Path, name: str) -> None:
    """A proxy before the server might have checked the other one."""
    client, scheme = http(gateway(file)), "Bearer " if name == "authorization" else ""
    for keys in (
        ("alice-key", "wrong"),
        ("wrong", "alice-key"),
        ("alice-key", "alice-key"),
        ("bob-key-2", "alice-key"),
    ):
        answer = client.get("/v1/models", headers=[(name, f"{scheme}{key}") for key in keys])
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert f"{name} was given 2 times" in answer.json()["error"]["message"]
    assert client.get("/v1/models", headers={"x-api-key": "wrong", **bearer("alice-key")}).status_code == 200
    assert http(gateway(None)).get("/v1/models", headers=[(name, "a"), (name, "b")]).status_code == 200


def test_without_the_setting_no_key_is_needed() -> None:
    client = http(gateway(None))
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    assert asked(client, "any").status_code == 200


def test_ready_asks_no_more_than_whether_requests_are_taken() -> None:
    made = gateway(None)
    pipelines = made.service.pipelines
    assert isinstance(pipelines, Scripted)
    client = http(made)
    assert client.get("/ready").status_code == 200
    assert pipelines.requests == []
    asyncio.run(made.service.drain(0.0))
    refused = client.get("/ready")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    made.service = Service(load_settings(), model(), Scripted())  # its check raises: no tiers
    assert http(made).get("/ready").status_code == 503


def test_the_version_names_what_determines_tokens() -> None:
    answer = http(gateway(None)).get("/version").json()
    assert answer == {"version": model_version(), "system_fingerprint": model().fingerprint}


def model_version() -> str:
    import triforce_core

    return triforce_core.__version__


def test_an_id_is_made_for_a_request_that_has_none(caplog: pytest.LogCaptureFixture) -> None:
    client = http(gateway(None))
    with caplog.at_level(logging.INFO, "ray.serve"):
        made = [asked(client).headers["x-request-id"] for _ in range(2)]
        refused = client.get("/v2").headers["x-request-id"]
        client.get("/v1/models", headers={"x-request-id": "mine 1"})
    assert [line["id"] for line in lines_of(caplog)] == [*made, refused, "mine 1"]
    assert len({*made, refused}) == 3


@pytest.mark.parametrize("given", ["", "x" * 129, "caf\xe9", "tab\there"])
def test_an_id_that_is_not_sound_is_refused(given: str) -> None:
    answer = http(gateway(None)).get("/v1/models", headers={"x-request-id": given.encode("latin-1")})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-request-id"
    assert "1 to 128 printable ASCII characters" in answer.json()["error"]["message"]
    assert http(gateway(None)).get("/v1/models", headers={"x-request-id": "x" * 128}).status_code == 200


def test_what_serve_cannot_decode_reaches_the_gateway() -> None:
    """Serve applies the middlewares that an environment variable names. Then its proxy decodes headers as UTF-8."""
    app = gateway(None).__serve_build_asgi_app__()

    async def proxy(scope: Scope, receive: Receive, send: Send) -> None:
        for _, value in scope.get("headers", ()):
            value.decode()
        await app(scope, receive, send)

    named = import_attr(ENVIRONMENT["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"])
    served = _apply_middlewares(proxy, named())

    def answer(**headers: bytes) -> tuple[int, bytes]:
        """Call the app directly: no client for tests reads a header that is not ASCII, as the id is that Serve
        returns.
        """
        given = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "query_string": b"", "headers": given}
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(served(scope, receive, send))
        return sent[0]["status"], sent[1]["body"]

    status, body = answer(x_request_id=b"caf\xe9")
    assert (status, json.loads(body)["error"]["param"]) == (400, "x-request-id")
    for name in ("authorization", "traceparent", "x_session_id", "serve_multiplexed_model_id"):
        assert answer(**{name: b"caf\xe9"})[0] == 200


def test_a_body_above_the_limit_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "most_body_bytes", 100)
    client = http(gateway(None))
    kind = {"content-type": "application/json"}
    small, large = b'{"prompt": "a"}' + b" " * 85, b'{"prompt": "a"}' + b" " * 86

    def pieces(body: bytes) -> Iterator[bytes]:  # sent without its length
        for i in range(0, len(body), 7):
            yield body[i : i + 7]

    assert client.post("/v1/completions", content=small, headers=kind).status_code == 200
    assert client.post("/v1/completions", content=pieces(small), headers=kind).status_code == 200
    for body in (large, pieces(large), b"{" * 101):
        answer = client.post("/v1/completions", content=body, headers=kind)
        assert answer.status_code == 413
        error = answer.json()["error"]
        assert error["param"] == "body"
        assert "must be at most 100 bytes" in error["message"]
        assert "101 bytes" in error["message"] or "105 bytes" in error["message"]


def taken(made: Gateway, path: str, pieces: int = 64, method: str = "POST", **headers: str) -> tuple[int, int]:
    """Send a body in `pieces` of 1000 bytes. Return the status, and how many pieces were taken."""
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": given}
    count, status = 0, 0

    async def receive() -> dict[str, Any]:
        nonlocal count
        count += 1
        return {"type": "http.request", "body": b"x" * 1000, "more_body": count < pieces}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    asyncio.run(made.__serve_build_asgi_app__()(scope, receive, send))
    return status, count


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_without_a_key_no_body_is_read(file: Path, path: str) -> None:
    made = gateway(file)
    assert taken(made, path, method="GET", transfer_encoding="chunked") == (200, 0)
    assert taken(made, path, content_length="64000") == (405, 0)
    for closed in ("/v1/completions", "/", "/page/app.js"):
        assert taken(made, closed, transfer_encoding="chunked") == (401, 0)


def test_a_body_holds_a_place_while_it_comes(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """A body that stops is given up, and a full server refuses a request before its body has come."""
    monkeypatch.setattr(guard, "BODY_GRACE_S", 0.2)
    made = gateway(file)
    held: list[int] = []
    statuses: list[int] = []

    async def post(*bodies: bytes) -> tuple[int, dict[str, Any]]:
        scope = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b""}
        scope["headers"] = [(b"authorization", b"Bearer bob-key-2"), (b"transfer-encoding", b"chunked")]
        pieces, sent = iter(bodies), list[Any]()

        async def receive() -> dict[str, Any]:
            held.append(made.service.in_flight)
            for piece in pieces:
                return {"type": "http.request", "body": piece, "more_body": True}
            await asyncio.sleep(60)
            raise AssertionError("it was not given up")

        async def send(message: Any) -> None:
            sent.append(message)

        await made.__serve_build_asgi_app__()(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"])["error"]

    status, error = asyncio.run(post(b'{"prompt"', b": "))
    assert (status, error["param"], error["code"]) == (408, "body", "request_timeout")
    assert "11 bytes so far" in error["message"]
    assert held == [1, 1, 1]
    assert made.service.in_flight == 0

    async def crowd() -> list[tuple[int, dict[str, Any]]]:
        return await asyncio.gather(*(post(b"{") for _ in range(made.service.room + 1)))

    held.clear()
    statuses = [status for status, _ in asyncio.run(crowd())]
    assert sorted(statuses) == [408] * made.service.room + [429]
    assert made.service.in_flight == 0


def test_a_body_that_goes_on_coming_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_GRACE_S", 0.2)
    monkeypatch.setattr(guard, "LEAST_BODY_RATE", 1000)
    pieces = [b" " * 500] * 5 + [b'{"prompt": "a", "model": "demo"}']

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.1)
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    body = asyncio.run(guard.whole(receive, Headers({"transfer-encoding": "chunked"}), 10_000))
    assert body.endswith(b'"demo"}')
    assert len(body) == 2500 + 32


def test_a_body_in_pieces_is_counted_whatever_length_it_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "most_body_bytes", 2000)
    assert taken(gateway(None), "/v1/completions", transfer_encoding="chunked", content_length="5") == (413, 3)


def test_a_stated_length_may_have_any_number_of_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Service, "most_body_bytes", 2000)
    made = gateway(None)
    for length in ("2001", "10000", "9" * 5000):
        assert taken(made, "/v1/completions", content_length=length) == (413, 0)
    for length in ("2000", "999", "0" * 5000 + "2000"):
        assert taken(made, "/v1/completions", pieces=1, content_length=length) == (400, 1)  # it is no JSON


def test_the_limit_of_a_body_has_room_for_the_longest_prompt() -> None:
    service = gateway(None).service
    longest = service.model.limits.context_length * service.max_token_characters
    assert service.most_body_bytes > len(json.dumps({"prompt": "\U0001f600" * longest}))
    prompt = {"prompt": [service.model.limits.vocab_size - 1] * service.model.limits.context_length}
    assert service.most_body_bytes > len(json.dumps(prompt))


def test_browsers_are_let_in_from_the_origins_of_the_setting(file: Path) -> None:
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    app, other = {"origin": "https://app.example.com"}, {"origin": "https://other.example.com"}
    for made in (gateway(file), gateway(file, cors_origins=["https://app.example.com"])):
        client, on = http(made), bool(made.service.settings.server.cors_origins)
        allowed = client.options("/v1/completions", headers={**app, **preflight})
        assert allowed.status_code == (200 if on else 401)
        assert allowed.headers.get("access-control-allow-origin") == (app["origin"] if on else None)
        refused = client.get("/v1/models", headers=app)
        assert refused.status_code == 401
        assert refused.headers.get("access-control-allow-origin") == (app["origin"] if on else None)
        assert "access-control-allow-origin" not in client.get("/v1/models", headers=other).headers
    for wrong in ("app.example.com", "https://a.b/path", "https://*.b", "ftp://a.b"):
        with pytest.raises(InvalidValueError, match=r"^server.cors_origins: .*must be \* or an origin such as"):
            load_settings(server={"cors_origins": [wrong]})


# The log


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line_of_the_log(file: Path, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    client = http(gateway(file))
    with caplog.at_level(logging.DEBUG):
        client.post("/v1/completions", json={"prompt": PROMPT, "stream": stream}, headers=bearer("bob-key-2"))
        client.post("/v1/completions", json={"prompt": PROMPT}, headers=bearer("a-wrong-key"))
        client.get("/ready")
    done, refused = lines_of(caplog)
    prompt_tokens = len(ids(PROMPT))
    assert 0 < done.pop("ttft_s") <= done.pop("duration_s") < 60
    assert len(done.pop("id")) == 32
    assert done == {
        "api": "http",
        "route": "POST /v1/completions",
        "key": "bob",
        "status": 200,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(ids("a b")) + len(ids(" c")),
        "finish_reason": "stop",
    }
    assert (refused["status"], refused["key"], refused["ttft_s"], refused["finish_reason"]) == (401, "", None, None)
    for secret in (PROMPT, "bob-key-2", "a-wrong-key"):
        assert secret not in caplog.text


def test_an_unforeseen_error_of_any_route_is_logged_without_its_message(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: Any, **__: Any) -> None:
        try:
            raise ValueError(PROMPT)
        except ValueError as error:
            raise RuntimeError(PROMPT) from error

    monkeypatch.setattr(Service, "encode", failing)
    monkeypatch.setattr(Service, "check", failing)
    for path in ("/tokenize", "/v1/completions", "/health"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            client = TestClient(gateway(None).__serve_build_asgi_app__())  # raises what Serve would log
            answer = client.get(path) if path == "/health" else client.post(path, json={"prompt": PROMPT})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        assert answer.headers["x-request-id"]
        assert PROMPT not in caplog.text + answer.text
        for expected in ("internal error", "in failing", "builtins.ValueError", "builtins.RuntimeError"):
            assert expected in caplog.text
        assert next(lines_of(caplog))["status"] == 500


def test_an_error_that_is_its_own_cause_is_logged() -> None:
    """Serve's handles may raise an error again in this way."""
    error = ValueError(PROMPT)
    error.__cause__ = error
    assert traced(error).count("builtins.ValueError") == 1


def test_an_error_within_an_answer_that_has_begun_breaks_it_off_without_the_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = http_app(gateway(None).service)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"a"
        raise ValueError(PROMPT)

    app.add_route("/broken", lambda request: StreamingResponse(pieces()), methods=["GET"])
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError, match=r"^internal error \w{12}") as raised:
        TestClient(guarded(app, gateway(None).service, keys_of(None))).get("/broken")
    assert PROMPT not in "".join(traceback.format_exception(raised.value)) + caplog.text
    assert "builtins.ValueError" in caplog.text


def test_the_log_may_be_json(caplog: pytest.LogCaptureFixture) -> None:
    client = http(gateway(None, log="json"))
    with caplog.at_level(logging.INFO, "ray.serve"):
        client.get("/v1/models")
    [record] = [each for each in caplog.records if each.getMessage() == "call"]
    assert record.call["route"] == "GET /v1/models"  # type: ignore[attr-defined]
    assert record.call["status"] == 200  # type: ignore[attr-defined]


# gRPC


METHODS = list(gen.DESCRIPTOR.services_by_name["Generation"].methods_by_name)


@pytest.mark.parametrize("method", METHODS)
def test_no_grpc_method_answers_without_a_key(file: Path, method: str, caplog: pytest.LogCaptureFixture) -> None:
    made = gateway(file)
    with caplog.at_level(logging.INFO, "ray.serve"):
        for metadata in ({}, bearer("wrong"), {"authorization": "alice-key"}):
            context = Context(**metadata)
            [empty] = called(made, method, context)
            assert not empty.ListFields()
            assert context.status is not None
            assert context.status[0] is grpc.StatusCode.UNAUTHENTICATED
        allowed = Context(**bearer("alice-key"), x_request_id="mine")
        assert any(answer.ListFields() for answer in called(made, method, allowed))
    assert allowed.status is None
    assert allowed.trailing == [("request_id", "by-serve"), ("x-request-id", "mine")]
    lines = [*lines_of(caplog)]
    assert [line["status"] for line in lines] == [*["UNAUTHENTICATED"] * 3, "OK"]
    assert [line["id"] for line in lines] == [*["by-serve"] * 3, "mine"]
    assert (lines[-1]["route"], lines[-1]["key"]) == (method, "alice")
    assert lines[-1]["finish_reason"] == ("stop" if method.startswith("Generate") else None)
    assert PROMPT not in caplog.text


def test_two_keys_over_grpc_are_refused(file: Path) -> None:
    context = Context(**bearer("alice-key"))
    context.metadata.append(("authorization", "Bearer alice-key"))
    [empty] = called(gateway(file), "ListModels", context)
    assert not empty.ListFields()
    assert context.status is not None
    assert context.status[0] is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("given", ["x" * 6000, "caf\xe9", "", "two\nlines"])
def test_serves_id_is_taken_where_it_is_sound(caplog: pytest.LogCaptureFixture, given: str) -> None:
    """Serve takes the client's metadata `request_id` as its id, and returns it by itself."""
    with caplog.at_level(logging.INFO, "ray.serve"):
        for wished in (given, "mine"):
            called(gateway(None), "ListModels", Context(request_id=wished))
    own, serves = [line["id"] for line in lines_of(caplog)]
    assert re.fullmatch(r"[0-9a-f]{32}", own)
    assert serves == "mine"


def test_the_health_service_answers_without_a_key(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = gateway(file)
    made.service.draining = True  # so that a watch ends
    for metadata in ({}, bearer("wrong")):
        context = Context(**metadata)
        request = HealthCheckRequest()
        with caplog.at_level(logging.INFO, "ray.serve"):
            assert called(made, "Check", context, request) == called(made, "Watch", context, request)
        assert context.status is None
    assert [line["route"] for line in lines_of(caplog)] == ["Watch"] * 2
    assert set(asyncio.run(made.List(b"", Context())).statuses) == set(SERVICES)


def test_a_watch_that_is_refused_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_WATCHES_PER_HOST", 0)
    context = Context()
    with caplog.at_level(logging.INFO, "ray.serve"):
        [empty] = called(gateway(None), "Watch", context, HealthCheckRequest())
    assert not empty.ListFields()
    assert context.status is not None
    assert context.status[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert [line["status"] for line in lines_of(caplog)] == ["RESOURCE_EXHAUSTED"]


def test_errors_of_grpc_calls_are_reported_after_an_empty_answer(caplog: pytest.LogCaptureFixture) -> None:
    made = gateway(None)
    wrong = gen.GenerateRequest(text="a", model="other")
    with caplog.at_level(logging.INFO, "ray.serve"):
        for method in ("Generate", "GenerateStream"):
            context = Context()
            [empty] = called(made, method, context, wrong)
            assert not empty.ListFields()
            assert context.status is not None
            assert context.status[0] is grpc.StatusCode.NOT_FOUND
        unsound = Context(x_request_id="\xe9")
        called(made, "Generate", unsound)
        assert unsound.status is not None
        assert unsound.status[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert [line["status"] for line in lines_of(caplog)] == ["NOT_FOUND", "NOT_FOUND", "INVALID_ARGUMENT"]


def test_a_stream_that_its_client_leaves_is_logged_as_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    made = gateway(None, event(ids("a b")), 60.0)

    async def leave() -> None:
        answers = made.GenerateStream(gen.GenerateRequest(text="a"), grpc_context=Context())  # type: ignore[arg-type]
        await anext(answers)
        await answers.aclose()

    with caplog.at_level(logging.INFO, "ray.serve"):
        asyncio.run(leave())
    [line] = lines_of(caplog)
    assert (line["status"], line["completion_tokens"]) == ("CANCELLED", len(ids("a b")))
    assert made.service.in_flight == 0


# Fairness


def test_a_key_alone_may_hold_all_places_and_shares_them_with_others() -> None:
    shares = FairShare(8)
    for _ in range(8):
        shares.take("a", 1)
    with pytest.raises(OverloadedError):
        shares.take("a", 1)
    shares.refused("b", 1)  # there was no place for it
    shares.give_back("a", 1)
    with pytest.raises(OverloadedError, match="8 places are shared by 2 API keys, and this one holds 7 of its 4"):
        shares.take("a", 1)  # though one is free: it is for b
    shares.take("b", 1)
    shares.give_back("a", 4)
    shares.take("a", 1)
    with pytest.raises(OverloadedError):
        shares.take("a", 1)
    shares.take("b", 3)
    shares.give_back("b", 4)
    assert set(shares.held) == {"a"}


def test_a_request_above_the_share_leaves_others_theirs() -> None:
    """It cannot be served while another key has requests. So no room is kept free for it."""
    shares = FairShare(8)
    for _ in range(8):
        shares.take("a", 1)
    for _ in range(3):
        with pytest.raises(OverloadedError, match="2 API keys, and this request needs 5, more than a share of 4"):
            shares.refused("b", 5)
    shares.give_back("a", 1)
    shares.take("a", 1)  # as if b had never asked
    shares.refused("b", 4)
    shares.give_back("a", 4)
    with pytest.raises(OverloadedError, match="holds 4 of its 4"):
        shares.take("a", 1)
    with pytest.raises(OverloadedError, match="needs 5, more than a share of 4"):
        shares.take("b", 5)
    shares.take("b", 4)


def test_a_request_above_the_share_is_told_so(file: Path) -> None:
    """A full server tells this, too, here over gRPC."""

    async def run() -> tuple[grpc.StatusCode, str] | None:
        made = gateway(file, event(ids("a")), 0.2, event(ids(" b"), gen.FINISH_REASON_LENGTH), max_queued=1)
        room = made.service.room
        asked = [gen.GenerateRequest(text="a")] * room
        filling = [
            asyncio.create_task(made.Generate(each, grpc_context=Context(**bearer("alice-key"))))  # type: ignore[arg-type]
            for each in asked
        ]
        await asyncio.sleep(0.1)
        large = Context(**bearer("nobody-key"))
        await made.Generate(gen.GenerateRequest(text="a", n=room // 2 + 1), grpc_context=large)  # type: ignore[arg-type]
        assert not made.service.shares.refused_at
        await asyncio.gather(*filling)
        return large.status

    status = asyncio.run(run())
    assert status is not None
    assert status[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "more than a share of" in status[1]


def test_a_key_that_wants_no_more_frees_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.fair_share.WANTED_S", 0.0)
    shares = FairShare(4)
    shares.refused("b", 1)
    for _ in range(4):
        shares.take("a", 1)
    shares = FairShare(2)
    for key in "abcd":  # more keys than places: each may hold one
        shares.take(key, 1)


def test_the_service_gives_the_place_that_comes_free_to_the_other_key(file: Path) -> None:
    """One key fills the server, another is refused; the next free place is the other's."""

    async def run() -> list[str]:
        made = gateway(file, event(ids("a")), 0.2, event(ids(" b"), gen.FINISH_REASON_LENGTH), max_queued=1)
        room = made.service.room
        said: list[str] = []

        async def one(key: str) -> None:
            context = Context(**bearer(f"{key}-key"))
            await made.Generate(gen.GenerateRequest(text="a"), grpc_context=context)  # type: ignore[arg-type]
            said.append(f"{key} {'served' if context.status is None else context.status[0].name}")

        filling = [asyncio.create_task(one("alice")) for _ in range(room)]
        await asyncio.sleep(0.1)
        await one("nobody")
        assert said == ["nobody RESOURCE_EXHAUSTED"]
        await asyncio.gather(*filling[: room // 2 + 1])  # those end together
        more = [asyncio.create_task(one("alice")) for _ in range(room)]
        await asyncio.sleep(0)
        await asyncio.gather(*filling, *more, one("nobody"))
        assert made.service.in_flight == 0
        assert not made.service.shares.held
        return said[room + 1 :]

    said = asyncio.run(run())
    assert "nobody served" in said
    share = gateway(None, max_queued=1).service.room // 2
    assert said.count("alice served") == share
    assert said.count("alice RESOURCE_EXHAUSTED") > 0


def test_requests_for_tokens_count_in_the_share_of_their_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = gateway(file, max_queued=1)
    service, client = made.service, http(made)
    held: list[int] = []

    async def noted(self: Service, *_: Any, **__: Any) -> Any:
        held.append(self.shares.held["alice"])
        return ()

    monkeypatch.setattr(Service, "encode", noted)
    monkeypatch.setattr(Service, "decode", noted)

    def statuses() -> list[object]:
        alice = bearer("alice-key")
        over_http = [
            client.post("/tokenize", json={"prompt": "a"}, headers=alice).status_code,
            client.post("/detokenize", json={"tokens": [5]}, headers=alice).status_code,
        ]
        contexts = [Context(**alice), Context(**alice)]
        for method, context in zip(("Tokenize", "Detokenize"), contexts, strict=True):
            called(made, method, context, REQUESTS[method])
        return [*over_http, *(context.status and context.status[0] for context in contexts)]

    statuses()
    assert held == [1] * 4
    assert (service.in_flight, service.shares.held) == (0, {})
    service.shares.take("bob", 1)
    share = service.room // 2
    service.shares.take("alice", share)
    assert statuses() == [429, 429, *[grpc.StatusCode.RESOURCE_EXHAUSTED] * 2]
    assert len(held) == 4


def test_the_servers_own_probe_belongs_to_no_key(file: Path) -> None:
    made = gateway(file)

    async def probe() -> None:
        async for _ in made.service.complete(ClientRequest(prompt="a", sampling=GREEDY, max_tokens=2)):
            assert set(made.service.shares.held) == {""}

    asyncio.run(probe())


# The document


class Loads(HTMLParser):
    """Collects whatever a browser would load for a page, and all tags."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "srcset", "data", "style", "action")]
        if tag == "link":
            self.loaded.append("link")


def test_the_page_of_the_document_loads_nothing_and_names_every_status() -> None:
    client = http(gateway(None))
    page, document = client.get("/docs"), client.get("/openapi.json").json()
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    loads = Loads()
    loads.feed(page.text)
    assert loads.loaded == []
    assert not loads.tags & {"script", "iframe", "img", "object", "embed"}
    assert "url(" not in page.text
    assert "@import" not in page.text
    for path, verbs in document["paths"].items():
        for verb, operation in verbs.items():
            assert f"{verb.upper()} {path}" in page.text
            for status in operation["responses"]:
                assert f"<td>{status}</td>" in page.text
    for name in document["components"]["schemas"]:
        assert f'id="{name}"' in page.text
    assert client.get("/redoc").status_code == 404


def test_every_route_names_what_the_guard_may_answer() -> None:
    app = http_app(gateway(None).service)
    document = app.openapi()
    assert document is app.openapi()
    assert len(document["paths"]) >= 11
    for path, verbs in document["paths"].items():
        for operation in verbs.values():
            answers = set(operation["responses"])
            assert {"200", "400"} <= answers
            assert ("401" in answers) == ("security" in operation) == (path not in OPEN_PATHS)
            assert ("requestBody" in operation) == ({"408", "413", "429", "503"} <= answers)
