"""The application of the chart's CPU example as a cluster gets it: `ray start` with the rendered environment and a
token; then the rendered Serve config sent to its dashboard, as KubeRay does.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.charts import CHART, environment, pod_templates, rendered, serve_config
from tests.serve.conftest import free_ports
from tests.starting import LocalRay, children
from triforce_core.client import TriForceClient

NAMES = ("http", "grpc", "gcs", "dashboard", "agent", "metrics", "client")
READY_S, END_S = 150.0, 20.0
pytestmark = pytest.mark.slow  # a Ray of its own, and a start of the whole application


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return dict(zip(NAMES, free_ports(len(NAMES)), strict=True))


@pytest.fixture(scope="module")
def application(ports: dict[str, int], local_ray: LocalRay) -> Iterator[dict[str, Any]]:
    local_ray.end()
    objects = rendered(CHART / "examples" / "cpu-demo.yaml")
    config = serve_config(objects)
    # Ports of the loopback that are free here; in a pod all are.
    config["http_options"] |= {"host": "127.0.0.1", "port": ports["http"]}
    config["grpc_options"]["port"] = ports["grpc"]
    config["applications"][0]["args"]["server"] |= {"port": ports["http"], "grpc_port": ports["grpc"]}
    token = secrets.token_hex(16)
    # What the chart renders, and what KubeRay adds for `authOptions`.
    variables = environment(pod_templates(objects)["pipeline"]) | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's own ports stay on the loopback too
    folder = tempfile.mkdtemp(prefix="tf-")  # short, because the paths of sockets are limited
    command = [
        *(str(Path(sys.prefix, "bin", "ray")), "start", "--head", "--block", "--num-cpus=2", "--disable-usage-stats"),
        *("--node-ip-address=127.0.0.1", f"--port={ports['gcs']}", f"--temp-dir={folder}"),
        *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={ports['dashboard']}"),
        *(f"--dashboard-agent-listen-port={ports['agent']}", "--min-worker-port=0", "--max-worker-port=0"),
        *(f"--metrics-export-port={ports['metrics']}", f"--ray-client-server-port={ports['client']}"),
    ]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    log = Path(folder, "start.log")
    before = children()
    with log.open("w") as output:
        head = subprocess.Popen(command, env=inherited | variables, stdout=output, stderr=subprocess.STDOUT)
    dashboard = f"http://127.0.0.1:{ports['dashboard']}/api/serve/applications/"
    known = {"Authorization": f"Bearer {token}"}
    try:
        wait_for(lambda: requests.get(dashboard, headers=known, timeout=5).status_code == 200, head, log)
        assert requests.put(dashboard, json=config, timeout=30).status_code == 401, "without the token nobody deploys"
        answer = requests.put(dashboard, json=config, headers=known, timeout=60)
        assert answer.status_code == 200, answer.text
        health = f"http://127.0.0.1:{ports['http']}/health"
        wait_for(lambda: requests.get(health, timeout=5).status_code == 200, head, log)
        found: dict[str, Any] = requests.get(dashboard, headers=known, timeout=10).json()
        yield found
    finally:
        started = children() - before
        for each in started:
            with suppress(psutil.NoSuchProcess):
                each.terminate()
        _, left = psutil.wait_procs(started, timeout=END_S)
        for each in left:
            each.kill()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(condition: Any, head: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + READY_S
    while True:
        try:
            if condition():
                return
        except requests.RequestException:
            pass
        assert head.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.5)


def test_it_answers_over_http(application: dict[str, Any], ports: dict[str, int]) -> None:
    asked = {"model": "demo", "prompt": "def main():", "max_tokens": 16, "temperature": 0}
    answer = requests.post(f"http://127.0.0.1:{ports['http']}/v1/completions", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 16


def test_it_answers_over_grpc(application: dict[str, Any], ports: dict[str, int]) -> None:
    with TriForceClient(f"127.0.0.1:{ports['grpc']}") as client:
        assert client.generate("def main():", max_tokens=16, temperature=0).text


def test_tokens_are_streamed_one_event_after_another(application: dict[str, Any], ports: dict[str, int]) -> None:
    asked = {"model": "demo", "prompt": "def main():", "max_tokens": 64, "temperature": 0, "stream": True}
    url = f"http://127.0.0.1:{ports['http']}/v1/completions"
    with requests.post(url, json=asked, stream=True, timeout=60) as answer:
        arrivals = [time.monotonic() for line in answer.iter_lines() if line]
    assert len(arrivals) > 10
    assert arrivals[-1] - arrivals[0] > 0.02, "all at once: something on the way waits for the end"
    with TriForceClient(f"127.0.0.1:{ports['grpc']}") as client:
        assert len([chunk for chunk in client.stream("def main():", max_tokens=64, temperature=0) if chunk.text]) > 5


def test_a_client_that_goes_away_frees_its_place(application: dict[str, Any], ports: dict[str, int]) -> None:
    server = f"http://127.0.0.1:{ports['http']}"
    asked = {"model": "demo", "prompt": "def main():", "max_tokens": 8000, "seed": 1, "stream": True}
    with requests.post(f"{server}/v1/completions", json=asked, stream=True, timeout=60) as answer:
        lines = answer.iter_lines()  # it is kept, because its end would close the connection
        next(lines)
        assert requests.get(f"{server}/status", timeout=10).json()["in_flight"] == 1
    until = time.monotonic() + 10
    while requests.get(f"{server}/status", timeout=10).json()["in_flight"]:
        assert time.monotonic() < until
        time.sleep(0.1)


OF_GPUS = {"ray_node_gpus_utilization", "ray_node_gram_used"}  # only where there is a GPU


def test_the_dashboard_shows_metrics_that_exist(application: dict[str, Any], ports: dict[str, int]) -> None:
    """Every panel, in one of the two scrapes: of the server's metrics and of Ray's."""
    panels = json.loads((CHART / "files" / "dashboard.json").read_text())["panels"]
    expressions = [" ".join(target["expr"] for target in panel["targets"]) for panel in panels]
    named = [set(re.findall(r"\b(?:ray|triforce)_\w+", each)) for each in expressions]
    assert all(named)
    wanted = set().union(*named) - OF_GPUS
    assert len(wanted) > 20
    until = time.monotonic() + 60  # Ray gathers its processes' metrics every few seconds
    while missing := wanted - set(
        re.findall(r"^\w+", scraped(ports["http"]) + scraped(ports["metrics"]), re.MULTILINE)
    ):
        assert time.monotonic() < until, missing
        time.sleep(1)


def scraped(port: int) -> str:
    """The metrics, which Prometheus reads without a token."""
    return requests.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text


def test_serve_runs_what_was_rendered(application: dict[str, Any]) -> None:
    [name] = application["applications"]
    deployments = application["applications"][name]["deployments"]
    assert (name, set(deployments)) == ("triforce", {"gateway", "pipeline"})
