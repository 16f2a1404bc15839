"""The front: real connections to HAProxy, before uvicorn with a small application."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

import deploy.front
from deploy.front import Behind, front
from deploy.grpc_gate import PEER
from tests.certificates import certify, name_of
from tests.serve.conftest import free_ports
from triforce_core.config import ServerSettings
from triforce_core.errors import InvalidValueError, UnavailableError

MAX_HEADER_BYTES = 64 << 10
UNREAD_S = 1
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
            await asyncio.sleep(3 * UNREAD_S)
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
def behind(application: Application) -> Iterator[int]:
    """The port of uvicorn with the application."""
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


@contextmanager
def running(behind: int, log: Path | None = None, **settings: Any) -> Iterator[ServerSettings]:
    """The front before the application, with its settings."""
    port, grpc_port = free_ports(2)
    server = ServerSettings(port=port, grpc_port=grpc_port, **settings)
    with front(server, Behind(behind, 1), log):
        yield server


@pytest.fixture
def port(behind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The front's, with shorter times."""
    shorter = tmp_path / "haproxy.cfg"
    given = deploy.front.CONFIGURATION.read_text()
    for name, before, after in (("http-request", "10s", "500ms"), ("client", "30s", f"{UNREAD_S}s")):
        assert f"timeout {name} {before}" in given
        given = given.replace(f"timeout {name} {before}", f"timeout {name} {after}")
    shorter.write_text(given)
    monkeypatch.setattr(deploy.front, "CONFIGURATION", shorter)
    with running(behind, tmp_path / "log") as server:
        yield server.port


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


@pytest.mark.parametrize("step", [1000, ENDLESS])
@pytest.mark.parametrize(
    "begin", [b"GET /", POST + b"x: ", POST + b"x", POST + b"transfer-encoding: chunked\r\n\r\n1;"], ids=str
)
def test_what_never_ends_is_cut_off(port: int, begin: bytes, step: int) -> None:
    with connected(port) as client:
        client.sendall(begin)
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(0, ENDLESS, step):
                client.sendall(b"a" * step)
        assert answer(client)[0] in (0, 400)  # what is on its way may reset the connection before its answer is read


def test_a_header_may_be_long_but_not_too_long(port: int) -> None:
    for length, expected in ((MAX_HEADER_BYTES - 500, 200), (MAX_HEADER_BYTES + 8000, 400)):
        for lines in (1, 50):
            with connected(port) as client:
                value = b"a" * (length // lines - 1)
                client.sendall(POST + (b"x: %s\r\n" % value) * lines + b"content-length: 2\r\n\r\nhi")
                status, body = answer(client)
            assert status == expected
            assert (b"hi" in body) == (expected == 200)


def test_many_short_lines_are_a_long_header_too(port: int) -> None:
    with connected(port) as client:
        client.sendall(POST + b"a:\r\n" * (MAX_HEADER_BYTES // 5) + b"\r\n")
        assert answer(client)[0] == 400


@pytest.mark.parametrize("lines", [1, 5000])
def test_connect_is_refused_at_once(port: int, lines: int) -> None:
    began = time.monotonic()
    with connected(port) as client:
        client.sendall(b"CONNECT x:80 HTTP/1.1\r\n" + b"a:\r\n" * lines + b"\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 400 ")
    assert time.monotonic() - began < 2


def test_a_header_has_some_seconds(port: int) -> None:
    for begun, status in ((b"", 0), (b"GET /echo HT", 408)):
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
    asked += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
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
        until = time.monotonic() + 4 * UNREAD_S
        while time.monotonic() < until:
            assert client.recv(50_000)
            assert not application.ended.wait(0.05)
    assert application.ended.wait(10)


def test_a_pause_of_the_application_is_no_fault_of_the_client(port: int) -> None:
    with connected(port) as client:
        client.sendall(b"GET /pause HTTP/1.1\r\nhost: a\r\n\r\n")
        assert answer(client) == (200, b"0\r\n\r\n")


def certified(folder: Path, name: str = "localhost") -> dict[str, str]:
    """The settings of a new certificate."""
    certificate, key = certify(folder, name)
    return {"certificate": str(certificate), "certificate_key": str(key)}


def eventually(check: Callable[[], bool], within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_tls_and_a_certificate_that_changes_while_a_stream_runs(behind: int, tmp_path: Path) -> None:
    files = certified(tmp_path)
    with running(behind, tmp_path / "log", **files) as server:
        trusting = ssl.create_default_context(cafile=files["certificate"])
        with (
            socket.create_connection(("127.0.0.1", server.port)) as plain,
            trusting.wrap_socket(plain, server_hostname="localhost") as client,
        ):
            client.settimeout(10)
            client.sendall(b"GET /flood HTTP/1.1\r\nhost: a\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            certify(tmp_path, "changed")
            eventually(lambda: name_of(server.port) == name_of(server.grpc_port) == "changed")
            Path(files["certificate"]).write_text("no certificate")
            time.sleep(2 * deploy.front.RENEW_S)
            assert name_of(server.port) == "changed", "a file that is wrong is not used"
            assert client.recv(1000)
        certify(tmp_path, "again")
        eventually(lambda: name_of(server.port) == "again")


def test_http_2(behind: int, tmp_path: Path) -> None:
    with running(behind, tmp_path / "log", **certified(tmp_path)) as server:
        for port, expected in ((server.port, "h2"), (server.grpc_port, "h2")):
            context = ssl.create_default_context(cafile=tmp_path / "certificate.pem")
            context.set_alpn_protocols(["h2", "http/1.1"])
            with (
                socket.create_connection(("127.0.0.1", port)) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as client,
            ):
                assert client.selected_alpn_protocol() == expected
        command = ["curl", "-sS", "--http2", "--cacert", tmp_path / "certificate.pem", "-d", "hello"]
        url = f"https://localhost:{server.port}/echo"
        said = subprocess.check_output([*command, "-w", " %{http_version}", url], text=True, timeout=20)
        assert said == "hello 2"


def test_files_that_are_no_pair_are_refused(behind: int, tmp_path: Path) -> None:
    files = certified(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    wrong = [
        ({**files, "certificate_key": certified(other)["certificate_key"]}, "key"),
        ({**files, "certificate": str(tmp_path / "absent")}, "No such file"),
        ({**files, "certificate": str(tmp_path / "log")}, "PEM"),
    ]
    (tmp_path / "log").write_text("")
    for settings, expected in wrong:
        with pytest.raises(InvalidValueError, match=rf"server\.certificate.*{expected}"), running(behind, **settings):
            pass
    with pytest.raises(ValueError, match="certificate and certificate_key must be given together"):
        ServerSettings(certificate="a")


def test_a_peer_has_only_so_many_connections(behind: int, tmp_path: Path) -> None:
    with running(behind, tmp_path / "log", connections_per_peer=5) as server, ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connected(server.port))
        time.sleep(0.3)
        with connected(server.port) as client, suppress(ConnectionResetError, BrokenPipeError):
            client.sendall(b"GET /early HTTP/1.1\r\nhost: a\r\n\r\n")
            assert client.recv(100) == b""
        other = socket.create_connection(("127.0.0.1", server.port), source_address=("127.0.0.2", 0))
        with other as client:
            client.sendall(b"GET /early HTTP/1.1\r\nhost: a\r\n\r\n")
            assert answer(client)[0] == 200


def test_a_front_that_is_killed_comes_back(behind: int, tmp_path: Path) -> None:
    with running(behind, tmp_path / "log") as server:
        for _ in range(3):
            killed = child("haproxy")
            killed.kill()
            killed.wait()

            def is_back() -> bool:
                with suppress(OSError), connected(server.port) as client:
                    client.sendall(POST + b"content-length: 2\r\n\r\nhi")
                    return answer(client)[0] == 200
                return False

            eventually(is_back)
        last = child("haproxy")
    assert not last.is_running()
    with pytest.raises(ConnectionRefusedError):
        connected(server.port)


def child(name: str) -> psutil.Process:
    [found] = [each for each in psutil.Process().children() if each.name() == name and each.is_running()]
    return found


def test_a_port_that_is_taken_is_an_error(behind: int, tmp_path: Path) -> None:
    with running(behind, tmp_path / "log") as server:
        other = ServerSettings(port=server.port, grpc_port=server.grpc_port)
        with pytest.raises(UnavailableError, match="HAProxy did not start"), front(other, Behind(1, 1), tmp_path / "2"):
            pass
    assert "Address already in use" in (tmp_path / "2").read_text()


def test_a_gateway_goes_before_the_proxy_of_serve(behind: int, tmp_path: Path) -> None:
    """One that does not listen any more loses no request, and none is sent twice."""
    port, grpc_port = free_ports(2)
    server = ServerSettings(port=port, grpc_port=grpc_port)
    first = deploy.front.free_ports(2 * deploy.front.GATEWAYS)
    with front(server, Behind(behind, 1, first, first + deploy.front.GATEWAYS), tmp_path / "log"):
        assert posted(port) == 200, "the proxy answers where there is no gateway"
        received = []
        with socket.create_server(("127.0.0.1", first + deploy.front.GATEWAYS - 1)) as listening:
            eventually(lambda: f"http/gateway{deploy.front.GATEWAYS} is UP" in (tmp_path / "log").read_text())

            def take() -> None:
                with suppress(OSError):
                    while True:
                        asked, _ = listening.accept()
                        with asked:
                            received.append(asked.recv(1000))

            taking = threading.Thread(target=take)
            taking.start()
            assert posted(port) == 502, "it ended before it answered"
            assert len([each for each in received if each]) == 1
            listening.shutdown(socket.SHUT_RDWR)
            taking.join()
        assert posted(port) == 200


def posted(port: int) -> int:
    with connected(port) as client:
        client.sendall(POST + b"content-length: 2\r\nconnection: close\r\n\r\nhi")
        return answer(client)[0]


def test_an_interrupt_of_the_terminal_ends_no_request(behind: int, tmp_path: Path) -> None:
    """It goes to all processes of the group; the server then lets requests in flight end."""
    port, grpc_port = free_ports(2)
    log = str(tmp_path / "log")
    program = (
        "import signal, sys, time; from pathlib import Path; from deploy.front import *\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        f"with front(ServerSettings(port={port}, grpc_port={grpc_port}), Behind({behind}, 1), Path({log!r})):\n"
        "    print('ready', flush=True); sys.stdin.read()\n"
    )
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True, **options) as running_front:
        assert running_front.stdout.readline() == "ready\n"
        [found] = psutil.Process(running_front.pid).children()
        with connected(port) as client:
            client.sendall(b"GET /pause HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            time.sleep(0.3)
            os.killpg(running_front.pid, signal.SIGINT)
            assert answer(client) == (200, b"0\r\n\r\n"), "it is whole"
        running_front.stdin.close()
        assert running_front.wait(20) == 0
    assert not found.is_running()


@pytest.mark.parametrize("pause_s", [0.0, 0.002, 0.02, 0.2])
def test_a_front_that_ends_as_it_is_stopped_leaves_nothing(behind: int, tmp_path: Path, pause_s: float) -> None:
    with running(behind, tmp_path / "log"):
        child("haproxy").kill()
        time.sleep(pause_s)
    assert not [each for each in psutil.Process().children() if each.name() == "haproxy"]


def test_it_knows_no_secret(behind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "hidden")
    with running(behind, tmp_path / "log"):
        known = child("haproxy").environ()
    assert {name for name in known if not name.startswith("FRONT_")} <= {"PATH", "TRIFORCE_RUN"}


def test_a_peer_has_only_so_many_requests(behind: int, tmp_path: Path) -> None:
    """Over one connection of HTTP/2, each of them would take a connection to the gateway."""
    with running(behind, tmp_path / "log", connections_per_peer=10, **certified(tmp_path)) as server:
        url = f"https://localhost:{server.port}/pause?[1-30]"
        command = ["curl", "-s", "--http2", "--parallel", "--parallel-max", "30", "-o", "/dev/null"]
        command += ["--cacert", str(tmp_path / "certificate.pem"), "-w", "%{http_code}\n", url]
        statuses = subprocess.check_output(command, text=True, timeout=60).split()
    assert statuses.count("200") == 10
    assert statuses.count("429") == 20


def test_without_anything_behind_the_answer_is_503(tmp_path: Path) -> None:
    with running(1, tmp_path / "log") as server, connected(server.port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        status, body = answer(client)
        assert (status, json.loads(body)["error"]["code"]) == (503, "unavailable")


def test_the_key_is_in_no_file(behind: int, tmp_path: Path) -> None:
    files = certified(tmp_path)
    with running(behind, tmp_path / "log", **files):
        folder = Path(child("haproxy").environ()["FRONT_FOLDER"])
        assert [each.name for each in folder.iterdir()] == ["admin"]
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_a_call_of_grpc_may_wait_and_names_its_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer comes after the time that a client has for sending, and nobody else can say where a call came from."""
    shorter = tmp_path / "haproxy.cfg"
    shorter.write_text(deploy.front.CONFIGURATION.read_text().replace("timeout client 75s", "timeout client 1s"))
    monkeypatch.setattr(deploy.front, "CONFIGURATION", shorter)

    def wait(message: bytes, context: grpc.ServicerContext) -> bytes:
        time.sleep(3)
        return str([value for name, value in context.invocation_metadata() if name == PEER]).encode()

    handler = grpc.method_handlers_generic_handler("a", {"wait": grpc.unary_unary_rpc_method_handler(wait)})
    behind = grpc.server(ThreadPoolExecutor(), handlers=[handler])
    behind_port = behind.add_insecure_port("127.0.0.1:0")
    behind.start()
    files = certified(tmp_path)
    try:
        port, grpc_port = free_ports(2)
        server = ServerSettings(port=port, grpc_port=grpc_port, **files)
        with front(server, Behind(1, behind_port), tmp_path / "log"):
            trusted = grpc.ssl_channel_credentials(Path(files["certificate"]).read_bytes())
            with grpc.secure_channel(f"localhost:{grpc_port}", trusted) as channel:
                answer = channel.unary_unary("/a/wait")(b"", timeout=20, metadata=((PEER, "forged"),))
    finally:
        behind.stop(0).wait()
    assert answer == b"['127.0.0.1']"


def test_an_address_of_ipv6(behind: int, tmp_path: Path) -> None:
    with (
        running(behind, tmp_path / "log", host="::1") as server,
        socket.create_connection(("::1", server.port)) as client,
    ):
        client.sendall(b"GET /early HTTP/1.1\r\nhost: a\r\n\r\n")
        assert answer(client)[0] == 200
