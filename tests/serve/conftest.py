"""The real application, started once as a user starts it, and what talks to it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from openai import OpenAI

from deploy.app import ENVIRONMENT
from tests.starting import LocalRay, tried_twice
from triforce_core.client import TriForceClient

MAX_SEQUENCES, MAX_QUEUED = 4, 4
START_S, STOP_S = 130.0, 60.0  # a start is tried twice within a test's 300 s


@dataclass(frozen=True)
class Server:
    """Where the application is, and short ways to ask it."""

    port: int
    grpc_port: int
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def complete(self, prompt: Any = "def main():", *, read: bool = True, **fields: Any) -> requests.Response:
        """One request; any field may be given, however wrong."""
        return requests.post(
            f"{self.url}/v1/completions",
            data=json.dumps({"prompt": prompt, **fields}),
            headers={"content-type": "application/json"},
            stream=not read,
            timeout=120,
        )

    def stream(self, prompt: Any = "def main():", **fields: Any) -> requests.Response:
        return self.complete(prompt, stream=True, read=False, **fields)

    def status(self) -> dict[str, Any]:
        answer = requests.get(f"{self.url}/status", timeout=10)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def tiers_with_passes(self) -> set[str]:
        """The tiers whose models have computed something."""
        metrics = requests.get(f"{self.url}/metrics", timeout=10).text
        return set(re.findall(r'^triforce_tier_passes_total\{.*tier="(\w+)".*\}', metrics, re.MULTILINE))

    def live(self) -> dict[str, int]:
        """Requests at the gateway, and sequences that each tier holds."""
        status = self.status()
        return {"gateway": status["in_flight"], **{t["tier"]: t["live_sequences"] for t in status["tiers"]}}

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        until = time.monotonic() + timeout_s
        while any((live := self.live()).values()):
            assert time.monotonic() < until, f"still held after {timeout_s} s: {live}"
            time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class DidNotStartError(Exception):
    pass


TRIFORCE = (sys.executable, "-m", "deploy.cli")


def start(config: Path, log: Path, triforce: Sequence[str] = TRIFORCE, *options: str) -> subprocess.Popen[str]:
    """`triforce serve`, with what it prints in `log`; returns when it says that it is ready."""
    command = [*triforce, "serve", "--config", str(config), *options]
    # Without what this process has set for its own Ray.
    variables = {name: value for name, value in os.environ.items() if ENVIRONMENT.get(name) != value}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, env=variables)
    until = time.monotonic() + START_S
    while "ready after" not in log.read_text():
        ended = process.poll() is not None
        if ended or time.monotonic() > until:
            raise DidNotStartError(f"the server {'ended' if ended else 'is not ready'}:\n{log.read_text()}")
        time.sleep(0.2)
    return process


def stop(server: Server, log: Path) -> None:
    """End it as a supervisor does: what is in flight is finished, nothing new is taken, and nothing is left behind."""
    started = psutil.Process(server.process.pid).children(recursive=True)
    try:
        lines = server.stream(max_tokens=300, seed=0).iter_lines()
        first = next(lines)
        server.process.send_signal(signal.SIGTERM)
        refused = {server.complete(max_tokens=1).status_code for _ in range(5) if not time.sleep(0.1)}
        last = [line for line in lines if line][-1]
        code = server.process.wait(STOP_S)
    finally:
        server.process.kill()
        _, left = psutil.wait_procs(started, timeout=10)
        for each in left:
            each.kill()
    assert len(started) > 5, "Ray's processes are children of the server"
    assert first.startswith(b"data: ")
    assert last == b"data: [DONE]"
    assert 503 in refused <= {200, 503}
    assert code == 0, log.read_text()
    assert not left, f"left behind: {left}"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, local_ray: LocalRay) -> Iterator[Server]:
    local_ray.end()
    folder = tmp_path_factory.mktemp("serve")
    config, log = folder / "config.yaml", folder / "log.txt"
    port, grpc_port = free_ports(2)
    config.write_text(
        f"dtype: float32\n"
        f"max_sequences: {MAX_SEQUENCES}\n"
        f"server: {{port: {port}, grpc_port: {grpc_port}, max_queued: {MAX_QUEUED}}}\n"
    )
    running = Server(port, grpc_port, tried_twice(lambda: start(config, log)))
    warm = running.tiers_with_passes()
    yield running
    stop(running, log)
    assert warm == {"draft", "retrieval", "target"}, "a server that says it is ready is warm"
    said = log.read_text()
    assert "Traceback" not in said, said


@pytest.fixture(autouse=True)
def nothing_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test leaves the server empty and alive."""
    yield
    if "server" in request.fixturenames:
        server: Server = request.getfixturevalue("server")
        server.wait_idle()
        assert server.complete(max_tokens=1).status_code == 200


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[TriForceClient]:
    with TriForceClient(server.grpc_address, timeout_s=120) as client:
        yield client


@pytest.fixture(scope="session")
def openai(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def source() -> str:
    """A long text that the demo pair never saw: about 8,000 of its tokens."""
    return Path(sysconfig.get_paths()["stdlib"], "inspect.py").read_text(encoding="utf-8")[:30_000]
