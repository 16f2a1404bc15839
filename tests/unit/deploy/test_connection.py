"""The limits of one HTTP connection: real sockets to uvicorn, set up as Serve does, in front of a small application."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from deploy import connection
from deploy.connection import MAX_HEADER_BYTES
from deploy.headers import middlewares

POST = b"POST /echo HTTP/1.1\r\nhost: a\r\n"
ENDLESS = 40 * MAX_HEADER_BYTES


class Application:
    """/echo answers with the body, /early does not wait for it, /pause answers after a
    pause, /flood with more than any buffer holds."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", scope["path"] != "/early"
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/pause":
            await asyncio.sleep(3 * connection.UNREAD_S)
        if scope["path"] == "/flood":
            gone = asyncio.ensure_future(receive())
            while not gone.done():
                await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
                await asyncio.sleep(0)
        else:
            await send({"type": "http.response.body", "body": body, "more_body": False})
        self.ended.set()


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
def port(application: Application, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(connection, "HEADER_S", 0.5)
    monkeypatch.setattr(connection, "UNREAD_S", 1.0)
    monkeypatch.setitem(uvicorn.config.HTTP_PROTOCOLS, "auto", uvicorn.config.HTTP_PROTOCOLS["auto"])
    middlewares()
    server = uvicorn.Server(uvicorn.Config(application, lifespan="off", log_level="critical", timeout_keep_alive=60))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield listening.getsockname()[1]
        finally:
            server.force_exit = server.should_exit = True
            thread.join(10)
    assert not thread.is_alive()


def connected(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port))
    client.settimeout(10)
    return client


def answer(client: socket.socket) -> tuple[int, bytes]:
    """The status and body of one answer, of which the connection or a last chunk is the end; (0, b"") if none came."""
    got = b""
    while not got.endswith(b"0\r\n\r\n"):
        try:
            piece = client.recv(65536)
        except ConnectionResetError:  # what was sent beyond the limit is not read
            piece = b""
        if not piece:
            break
        got += piece
    head, _, body = got.partition(b"\r\n\r\n")
    return (int(head.split()[1]), body) if head else (0, b"")


def code(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


@pytest.mark.parametrize("step", [1000, ENDLESS])
@pytest.mark.parametrize(
    "begin", [b"GET /", POST + b"x: ", POST + b"x", POST + b"transfer-encoding: chunked\r\n\r\n1;"], ids=str
)
def test_what_never_ends_is_cut_off(port: int, begin: bytes, step: int) -> None:
    with connected(port) as client:
        client.sendall(begin)
        sent = 0
        try:
            while sent < ENDLESS:
                client.sendall(b"a" * step)
                sent += step
        except (BrokenPipeError, ConnectionResetError):
            pass
        else:
            assert step == ENDLESS, "the server goes on reading"
        status, body = answer(client)
        assert status in (0, 431)  # what is still on its way may reset the connection before its answer is read
        if status:
            assert code(body) == "request_header_fields_too_large"


def test_a_header_may_be_long_but_not_too_long(port: int) -> None:
    for length, expected in ((MAX_HEADER_BYTES - 500, 200), (MAX_HEADER_BYTES + 100, 431)):
        for lines in (1, 50):
            with connected(port) as client:
                value = b"a" * (length // lines - 1)
                client.sendall(POST + (b"x: %s\r\n" % value) * lines + b"content-length: 2\r\n\r\nhi")
                status, body = answer(client)
            assert status == expected
            assert b"hi" in body or code(body) == "request_header_fields_too_large"


def test_many_short_lines_are_a_long_header_too(port: int) -> None:
    with connected(port) as client:
        client.sendall(POST + b"a:\r\n" * (MAX_HEADER_BYTES // 5) + b"\r\n")
        assert answer(client)[0] == 431


@pytest.mark.parametrize("lines", [1, 5000])
def test_connect_is_refused_at_once(port: int, lines: int) -> None:
    began = time.monotonic()
    with connected(port) as client:
        client.sendall(b"CONNECT x:80 HTTP/1.1\r\n" + b"a:\r\n" * lines + b"\r\n")
        assert answer(client)[0] == 400
    assert time.monotonic() - began < 2  # the loop goes on for others, too


def test_a_header_has_some_seconds(port: int) -> None:
    for begun, status in ((b"", 0), (b"GET /echo HT", 408), (b"\r\n", 0)):
        began = time.monotonic()
        with connected(port) as client:
            client.sendall(begun)
            assert answer(client)[0] == status
        assert 0.4 < time.monotonic() - began < 5


def test_the_next_header_of_a_connection_has_some_seconds_too(port: int) -> None:
    with connected(port) as client:
        client.sendall(POST + b"content-length: 2\r\n\r\nhi")
        assert answer(client) == (200, b"2\r\nhi\r\n0\r\n\r\n")
        time.sleep(1)  # an idle connection is kept for as long as Serve says
        client.sendall(b"POST /ec")
        assert answer(client)[0] == 408


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("pause_s", [0.0, 0.1])
def test_an_upgrade_is_ignored(port: int, protocol: bytes, pause_s: float) -> None:
    """Java's HttpClient asks for h2c in its first request."""
    asked = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\nHTTP2-Settings: AAEAAEAA\r\n" % protocol
    pieces = [POST[:30], POST[30:] + asked, b"content-length: 5\r\n\r\nhe", b"llo"]
    with connected(port) as client:
        for piece in pieces if pause_s else [b"".join(pieces)]:
            client.sendall(piece)
            time.sleep(pause_s)
        assert answer(client) == (200, b"5\r\nhello\r\n0\r\n\r\n")
        client.sendall(POST + b"content-length: 2\r\n\r\nhi")
        assert answer(client) == (200, b"2\r\nhi\r\n0\r\n\r\n")


def test_a_body_that_goes_on_after_its_answer_gets_no_second_one(port: int) -> None:
    with connected(port) as client:
        client.sendall(b"GET /early HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n")
        assert answer(client)[0] == 200
        client.sendall(b"body")
        assert client.recv(100) == b""  # closed after HEADER_S


@pytest.mark.parametrize("closed", [False, True])
def test_a_stream_that_nobody_reads_ends(port: int, application: Application, closed: bool) -> None:
    with connected(port) as client:
        client.sendall(b"GET /flood HTTP/1.1\r\nhost: a\r\n\r\n")
        if closed:
            client.shutdown(socket.SHUT_WR)
        assert application.ended.wait(10)


def test_a_stream_that_is_read_slowly_goes_on(port: int, application: Application) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # so that what is read soon makes room
        client.connect(("127.0.0.1", port))
        client.sendall(b"GET /flood HTTP/1.1\r\nhost: a\r\n\r\n")
        until = time.monotonic() + 4 * connection.UNREAD_S
        while time.monotonic() < until:
            assert client.recv(50_000)
            assert not application.ended.wait(0.05)
    assert application.ended.wait(10)


def test_a_pause_of_the_application_is_no_fault_of_the_client(port: int) -> None:
    with connected(port) as client:
        client.sendall(b"GET /pause HTTP/1.1\r\nhost: a\r\n\r\n")
        assert answer(client) == (200, b"0\r\n\r\n")
