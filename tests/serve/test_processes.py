"""SIGKILL of each process that a start brings, one at a time under a stream: either its text does not change, or the
command ends at once. docs/operations.md has the table.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from deploy import remains
from tests.serve.conftest import Server, free_ports, start
from tests.serve.test_survival import asked_by_sdk, streamed, wait_until_served, whole
from tests.starting import LocalRay, tried_twice
from triforce_core.client import TriForceClient
from triforce_core.errors import TriForceError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENDS_WITHIN_S = 10.0
SAME, BY_SDK, ENDS = "the same text", "the same text by the SDK", "the command ends"
KINDS = {  # by a part of the command line that only this process has: what a client sees if it is killed
    "deploy.remains": SAME,
    "autoscaler/_private/monitor": SAME,
    "dashboard/dashboard.py": SAME,
    "_private/log_monitor": SAME,
    "ray::ServeController": SAME,
    "ray::ServeReplica:triforce:pipeline": SAME,
    "ray::DraftActor": SAME,
    "ray::RetrievalActor": SAME,
    "ray::TargetActor": SAME,
    "ray::ServeReplica:triforce:gateway": BY_SDK,
    "ray::ProxyActor": BY_SDK,
    "gcs/gcs_server": ENDS,
    "raylet/raylet": ENDS,
    "ray::DashboardAgent": ENDS,
    "ray::RuntimeEnvAgent": ENDS,
}

# What only helps Ray's dashboard, autoscaler and driver's console, none of which are used; and what only watches.
UNREPLACED = {"deploy.remains", "autoscaler/_private/monitor", "dashboard/dashboard.py", "_private/log_monitor"}


class Serving:
    """A server that is started again where the test before has ended it."""

    def __init__(self, folder: Path) -> None:
        self.config, self.log = folder / "config.yaml", folder / "log.txt"
        self.port, self.grpc_port = free_ports(2)
        server = {"port": self.port, "grpc_port": self.grpc_port}
        self.config.write_text(json.dumps({"dtype": "float32", "server": server}))  # in which texts are the same
        self.process: subprocess.Popen[str] | None = None
        self.mark, self.gone = "", set[str]()  # `gone`: the kinds that were killed, and that nobody starts again

    def server(self) -> Server:
        if self.process is None or self.process.poll() is not None:
            self.process = tried_twice(lambda: start(self.config, self.log))
            self.mark, self.gone = psutil.Process(self.process.pid).children()[0].environ()[remains.MARK], set()
        server = Server(self.port, self.grpc_port, self.process)
        wait_until_served(server)
        return server

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            assert self.process.wait(120) == 0, self.log.read_text()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, local_ray: LocalRay) -> Iterator[Serving]:
    local_ray.end()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.serve.conftest.START_S", 400.0)
        serving = Serving(tmp_path_factory.mktemp("processes"))
        yield serving
        serving.end()


def processes(serving: Serving, server: Server) -> dict[str, psutil.Process]:
    """All processes that belong to the server, by kind: one of each."""
    found = {*psutil.Process(server.process.pid).children(recursive=True), *remains.marked(serving.mark)}
    alive = [each for each in found if each.status() != psutil.STATUS_ZOMBIE]
    kinds = {kind: each for each in alive for kind in KINDS if kind in " ".join(each.cmdline())}
    assert kinds.keys() == KINDS.keys() - serving.gone
    assert len(kinds) == len(alive), alive
    return kinds


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_same_or_the_command_ends(serving: Serving, kind: str) -> None:
    server = serving.server()
    started, killed_at = processes(serving, server), 0.0
    text, usage = streamed(server)

    def kill() -> None:
        nonlocal killed_at
        killed_at = time.monotonic()
        started[kind].kill()

    def http() -> Any:
        try:
            return streamed(server, kill)
        except (requests.RequestException, AssertionError) as error:
            return repr(error)

    with TriForceClient(server.grpc_address, timeout_s=500, retries=0 if KINDS[kind] == ENDS else 40) as client:
        undisturbed = whole(asked_by_sdk(client))
        assert undisturbed[0] == text
        over_http: list[Any] = []
        reader = threading.Thread(target=lambda: over_http.append(http()))
        reader.start()
        try:
            by_sdk: Any = whole(asked_by_sdk(client))
        except TriForceError as error:
            by_sdk = repr(error)
        reader.join()
    print(f"\n{kind}: HTTP {over_http == [(text, usage)]}, SDK {by_sdk == undisturbed}")
    if KINDS[kind] == ENDS:
        code = server.process.wait(ENDS_WITHIN_S)
        print(f"{kind}: exit {code} after {time.monotonic() - killed_at:.1f} s")
        assert code == 1
        [said] = [line for line in serving.log.read_text().splitlines() if line.startswith("triforce: ")]
        assert "Ray has died" in said
        _, left = psutil.wait_procs(started.values(), timeout=killed_at + ENDS_WITHIN_S - time.monotonic())
        assert not left, left
        return
    assert by_sdk == undisturbed
    assert (over_http == [(text, usage)]) == (KINDS[kind] == SAME)
    serving.gone |= {kind} & UNREPLACED
    wait_until_served(server)
    print(f"{kind}: served again after {time.monotonic() - killed_at:.1f} s")
    assert streamed(server) == (text, usage)
