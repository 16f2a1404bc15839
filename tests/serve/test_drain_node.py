"""A node that ends lets its requests finish, and another takes over: what the chart's pods run before they end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from deploy import drain_node
from deploy.app import APPLICATION, application_of
from deploy.grpc_services import SERVICERS
from tests.serve.conftest import free_ports
from tests.starting import LocalRay, fake_nodes
from triforce_core.config import load_settings

pytestmark = pytest.mark.slow  # a cluster of three nodes, and two starts of a pipeline
DRAIN_S = 60
LABELS = {"zone": "tiers"}


@pytest.fixture
def port(local_ray: LocalRay) -> Iterator[int]:
    """The port of an application on one of two nodes. The head runs no part of it."""
    local_ray.end()
    port, grpc_port = free_ports(2)
    tiers = {tier: {"labels": LABELS} for tier in ("target", "retrieval", "draft")}
    settings = load_settings(
        server={"request_timeout_s": DRAIN_S}, placement={"strategy": "STRICT_PACK", **tiers}, dtype="float32"
    )
    with fake_nodes([{"labels": LABELS}, {"labels": LABELS}]):
        from ray import serve

        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": port},
            grpc_options={"port": grpc_port, "grpc_servicer_functions": SERVICERS},
        )
        serve.run(application_of(settings), name=APPLICATION, route_prefix="/")
        yield port
        serve.shutdown()


def test_requests_finish_on_a_node_that_ends(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    url = f"http://127.0.0.1:{port}/v1/completions"
    lines: list[bytes] = []

    def stream() -> None:
        asked = {"model": "demo", "prompt": "def main():", "max_tokens": 1500, "seed": 5, "stream": True}
        with requests.post(url, json=asked, stream=True, timeout=2 * DRAIN_S) as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    reader = threading.Thread(target=stream)
    reader.start()
    while len(lines) < 5:
        time.sleep(0.05)
    node, before = node_of_the_pipeline()
    # A pod holds one node, and sees its own processes only. Here all nodes are one machine's.
    monkeypatch.setattr(drain_node, "is_replica", lambda process: process.pid in before)
    monkeypatch.setattr(drain_node, "drain_node", lambda seconds: drain(node, seconds))
    monkeypatch.setattr(sys, "argv", ["drain_node", str(DRAIN_S)])
    drain_node.main()
    reader.join(1)
    assert not reader.is_alive(), "it was still being streamed when the node was given up"
    assert lines[-1] == b"data: [DONE]"
    answer: Any = requests.post(url, json={"prompt": "def main():", "max_tokens": 4}, timeout=DRAIN_S)
    assert answer.status_code == 200, answer.text
    assert len(ray.nodes()) == 3


def node_of_the_pipeline() -> tuple[str, set[int]]:
    """The pipeline's node, and the pids of all replicas on it. The gateway may be among them."""
    from ray._private import state

    alive = [each for each in state.actors().values() if each["State"] == "ALIVE"]
    replicas = [each for each in alive if "ServeReplica" in each["ActorClassName"]]
    [node] = {each["Address"]["NodeID"] for each in replicas if each["ActorClassName"].endswith("pipeline")}
    return node, {each["Pid"] for each in replicas if each["Address"]["NodeID"] == node}


def drain(node: str, seconds: int) -> None:
    import ray
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = client.drain_node(node, reason, "the pod ends", int((time.time() + seconds) * 1000))
    assert accepted, why
