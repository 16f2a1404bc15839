"""The chart's cpu-demo as KubeRay would run it, with containers for pods: Ray's head and a worker, each behind its
front, with KubeRay's commands, environment, limits and token. Then a test, a kill, a drain, the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests

from tests.charts import CHART, of_kind, pod_templates, rendered, serve_config
from tests.image.engine import Container, Engine, wait_for
from triforce_core.client import TriForceClient

TOKEN = "a-token-that-kuberay-would-make-0123456789"
OBJECTS = rendered(CHART / "examples/cpu-demo.yaml")
PODS = pod_templates(OBJECTS)
GIB = 2**30
QUESTION = {"prompt": "def main():", "max_tokens": 8, "temperature": 0}


@dataclass
class Pod:
    """A pod's front and Ray's container, in one network, with one /tmp."""

    engine: Engine
    image: str
    network: str
    name: str
    template: dict[str, Any]
    parts: list[Container] = field(default_factory=list)

    def options(self, container: dict[str, Any], memory: str) -> list[str]:
        limits = container["resources"]["limits"]
        size = memory.removesuffix("i").lower()
        options = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        # KubeRay lets shared memory grow to the limit of memory.
        options += [f"--memory={size}", f"--shm-size={size}", f"--cpus={limits['cpu']}"]
        given = {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}
        options += [f"--volume={self.name}-tmp:/tmp", "--volume=/home/triforce"]
        return [*options, *(f"--env={name}={text}" for name, text in given.items())]

    def start(self, start: str, **environment: str) -> Pod:
        spec = self.template["spec"]
        [front] = [each for each in spec["initContainers"] if each["name"] == "front"]
        [ray] = spec["containers"]
        command = [*front["command"], *front["args"]]
        options = self.options(front, "1Gi")
        options += ["--network", self.network]
        self.parts = [self.engine.start(f"{self.name}-front", self.image, *options, command=command)]
        options = self.options(ray, ray["resources"]["limits"]["memory"])
        kuberay = {"RAY_CLUSTER_NAME": "demo", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, **environment}
        options += ["--network", f"container:{self.name}-front", *(f"--env={k}={v}" for k, v in kuberay.items())]
        command = ["/bin/bash", "-c", "--", f"ulimit -n 65536 || ulimit -n $(ulimit -Hn); {start}"]
        self.parts.append(self.engine.start(f"{self.name}-ray", self.image, *options, command=command))
        return self

    @property
    def address(self) -> str:
        return self.parts[0].address

    @property
    def ray(self) -> Container:
        return self.parts[1]

    def logs(self) -> str:
        return "\n".join(each.logs()[-5000:] for each in self.parts)

    def healthy(self) -> bool:
        """KubeRay's probe."""
        page = "wget --tries 1 -T 2 -q -O- http://localhost:52365/api/local_raylet_healthz | grep success"
        return self.ray.run("bash", "-c", page).returncode == 0

    def answer(self) -> str:
        answer = requests.post(f"http://{self.address}:8000/v1/completions", json=QUESTION, timeout=60)
        if answer.status_code != 200:
            raise OSError(answer.text)
        return str(answer.json()["choices"][0]["text"])

    def remove(self) -> None:
        for each in reversed(self.parts):
            each.remove()
        self.engine("volume", "rm", "--force", f"{self.name}-tmp")


def head_pod(engine: Engine, image: str, network: str) -> Pod:
    flags = "--head --block --dashboard-agent-listen-port=52365 --dashboard-host=0.0.0.0"
    flags += f" --memory={3 * GIB} --metrics-export-port=8080 --num-cpus=0"
    pod = Pod(engine, image, network, "triforce-test-head", PODS["head"])
    return pod.start(f"ray start {flags}", RAY_ADDRESS="127.0.0.1:6379", RAY_PORT="6379")


def worker_pod(engine: Engine, image: str, network: str, head: Pod, number: int) -> Pod:
    flags = f"--address={head.address}:6379 --block --dashboard-agent-listen-port=52365"
    flags += f" --memory={6 * GIB} --metrics-export-port=8080 --num-cpus=2"
    pod = Pod(engine, image, network, f"triforce-test-worker-{number}", PODS["pipeline"])
    return pod.start(f"ray start {flags}", RAY_ADDRESS=f"{head.address}:6379", FQ_RAY_IP=head.address)


class Cluster:
    def __init__(self, engine: Engine, image: str, network: str) -> None:
        self.engine, self.image, self.network = engine, image, network
        self.head = head_pod(engine, image, network)
        wait_for(self.head.healthy, 120, self.head.logs)
        self.workers = [worker_pod(engine, image, network, self.head, 1)]

    @property
    def worker(self) -> Pod:
        return self.workers[-1]

    def applications(self, method: str = "GET", **body: Any) -> dict[str, Any]:
        """Serve's applications, as KubeRay's operator asks for them and sets them."""
        answer = requests.request(
            method,
            f"http://{self.head.address}:8265/api/serve/applications/",
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=60,
            **body,
        )
        answer.raise_for_status()
        return dict(answer.json() if answer.text else {})

    def state(self) -> str:
        return str(self.applications().get("applications", {}).get("triforce", {}).get("status"))

    def logs(self) -> str:
        return "\n".join(each.logs() for each in (self.head, *self.workers))

    def replace_worker(self) -> None:
        """As KubeRay does when a pod has ended."""
        self.worker.remove()
        self.workers.append(worker_pod(self.engine, self.image, self.network, self.head, len(self.workers) + 1))


@pytest.fixture(scope="module")
def cluster(engine: Engine, image: str, network: str) -> Iterator[Cluster]:
    made = Cluster(engine, image, network)
    try:
        wait_for(made.worker.healthy, 120, made.logs)
        made.applications("PUT", json=serve_config(OBJECTS))
        seconds = wait_for(lambda: made.state() == "RUNNING", 300, made.logs)
        used = [round(pod.ray.memory() / 1e9, 2) for pod in (made.head, made.worker)]
        print(f"\nRUNNING {seconds:.0f} s after the application was sent; GB of memory of head and worker: {used}")
        yield made
    finally:
        for each in (*made.workers, made.head):
            each.remove()


def test_the_test_of_helm_passes(cluster: Cluster, engine: Engine) -> None:
    [pod] = of_kind(OBJECTS, "Pod")
    [container] = pod["spec"]["containers"]
    host = f"--add-host=demo-serve-svc:{cluster.worker.address}"
    options = ("--network", cluster.network, "--rm", host, cluster.image)
    said = engine("run", *options, *container["command"], *container["args"], timeout_s=180).splitlines()
    assert said[0] == "200"
    assert len("\n".join(said[1:])) > 20


def test_the_answers_of_http_and_grpc_are_the_same_through_every_pod(cluster: Cluster) -> None:
    for pod in (cluster.worker, cluster.head):
        with TriForceClient(f"{pod.address}:9000", timeout_s=60) as client:
            text = client.generate(QUESTION["prompt"], max_tokens=8, temperature=0).text
        assert pod.answer() == text


def test_nobody_reaches_ray_without_the_token(cluster: Cluster) -> None:
    page = f"http://{cluster.head.address}:8265/api/serve/applications/"
    assert requests.get(page, timeout=10).status_code == 401


def test_a_worker_that_was_killed_is_replaced_and_answers_as_before(cluster: Cluster) -> None:
    before = cluster.worker.answer()
    for each in reversed(cluster.worker.parts):
        each.kill()
    cluster.replace_worker()
    seconds = wait_for(lambda: cluster.worker.answer() == before, 300, cluster.logs)
    print(f"\nanswers {seconds:.0f} s after the start of the worker in place of the killed one")


def test_a_pod_that_ends_lets_its_request_finish(cluster: Cluster) -> None:
    [ray] = cluster.worker.template["spec"]["containers"]
    leave = ray["lifecycle"]["preStop"]["exec"]["command"]
    fields = {**QUESTION, "max_tokens": 400, "stream": True, "ignore_eos": True}
    url = f"http://{cluster.worker.address}:8000/v1/completions"
    with requests.post(url, json=fields, stream=True, timeout=120) as open_:
        lines = open_.iter_lines()
        next(lines)
        with ThreadPoolExecutor(1) as reader:
            reading = reader.submit(lambda: [line for line in lines if line])
            left = cluster.worker.ray.run(*leave, timeout_s=300)
            cluster.worker.ray.kill("KILL")  # at once: what has not come by now never comes
            assert left.returncode == 0, left.stderr
            got = reading.result(timeout=60)
    assert got[-1] == b"data: [DONE]"
    assert json.loads(got[-2].removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
    cluster.worker.ray.wait(60)
    cluster.head.ray.kill("TERM")
    cluster.head.ray.wait(90)
    assert not cluster.worker.ray.running
