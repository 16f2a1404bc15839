"""Several pipelines behind one door: prefixes stay where they are, replicas come with the load and go with it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest
import requests

from deploy.app import application
from deploy.prefixes import BLOCK
from tests.serve.conftest import Server, free_ports
from tests.starting import LocalRay, fake_nodes
from triforce_core.config import Settings, load_settings

MAX_SEQUENCES = 2
LONG = 6000  # tokens
NUM_NODES = 3


def settings(port: int, grpc_port: int) -> Settings:
    """Two pipelines, each in one process with a GPU of its own; a third where they have too much to do."""
    replicas = {"min": 2, "max": 3, "downscale_delay_s": 3}
    return load_settings(
        dtype="float32",
        max_sequences=MAX_SEQUENCES,
        placement={"colocate": "all", "target": {"gpus": 1, "labels": {"ray.io/accelerator-type": "H100"}}},
        server={"port": port, "grpc_port": grpc_port, "replicas": replicas},
    )


@pytest.fixture(scope="module")
def replicas(local_ray: LocalRay) -> Iterator[Server]:
    """The application on a cluster of fake nodes with a GPU each."""
    local_ray.end()
    port, grpc_port = free_ports(2)
    nodes = [{"num_gpus": 1, "labels": {"ray.io/accelerator-type": "H100"}}] * NUM_NODES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deploy.app.UPSCALE_DELAY_S", 1.0)
        patch.setenv("RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "1")
        with fake_nodes(nodes), application(settings(port, grpc_port)):
            yield Server(port, grpc_port, cast("subprocess.Popen[str]", None))


def live_by_replica(server: Server) -> Counter[str]:
    """Requests that each replica's target holds."""
    return Counter({t["replica"]: t["live_sequences"] for t in server.status()["tiers"] if t["tier"] == "target"})


def wait_for_replicas(server: Server, count: int, timeout_s: float = 120) -> None:
    until = time.monotonic() + timeout_s
    while (found := len(live_by_replica(server))) != count:
        assert time.monotonic() < until, f"{found} replicas, not {count}"
        time.sleep(0.3)


def prompt(topic: int) -> list[int]:
    """Token ids of some blocks that only this topic's prompts share."""
    return random.Random(topic).choices(range(5, 4096), k=12 * BLOCK)


@contextmanager
def held(server: Server, tokens: list[int]) -> Iterator[tuple[str, Future[requests.Response]]]:
    """A long request, the replica that it landed on, and its stream; it is closed on leaving.

    Greedy, because the demo pair's text then never ends by itself. A request that waits its turn has no stream yet.
    """
    before = live_by_replica(server)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(server.stream, tokens, max_tokens=LONG, temperature=0)
        until = time.monotonic() + 30
        while not (grown := live_by_replica(server) - before):
            assert time.monotonic() < until, "it landed nowhere"
            time.sleep(0.05)
        yield next(iter(grown)), stream
        stream.result().close()


def wait_idle(server: Server) -> None:
    until = time.monotonic() + 30
    while any(live_by_replica(server).values()):
        assert time.monotonic() < until
        time.sleep(0.1)


def landed(server: Server, tokens: list[int]) -> str:
    with held(server, tokens) as (replica, _):
        pass
    wait_idle(server)
    return replica


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_go_where_their_prefix_is(replicas: Server) -> None:
    wait_for_replicas(replicas, 2)
    first = {topic: landed(replicas, prompt(topic)) for topic in range(8)}
    assert set(first.values()) == set(live_by_replica(replicas)), "different prefixes spread"
    for topic in reversed(range(8)):
        tail = random.Random(100 + topic).choices(range(5, 4096), k=100)
        assert landed(replicas, prompt(topic) + tail) == first[topic]


def found(server: Server, tokens: list[int]) -> float:
    """The share of a prompt's KV that a short request finds."""
    usage = server.complete(tokens, max_tokens=4, temperature=0).json()["usage"]
    return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_questions_on_documents_find_them(replicas: Server) -> None:
    wait_for_replicas(replicas, 2)
    where: dict[str, list[int]] = {}
    for topic in range(400, 420):
        where.setdefault(landed(replicas, prompt(topic)), prompt(topic))
        if len(where) == 2:
            break
    for question in range(6):
        tail = random.Random(question).choices(range(5, 4096), k=20)
        for replica, document in where.items():
            assert found(replicas, document + tail) > 0.9
            assert landed(replicas, document + tail) == replica
    other = Counter(found(replicas, prompt(topic)) for topic in range(430, 433))
    assert other == {0.0: 3}, "what nobody sent is nowhere"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_common_system_prompt_keeps_both_busy(replicas: Server) -> None:
    wait_for_replicas(replicas, 2)
    common = prompt(500)[:BLOCK]
    landed(replicas, common)
    with ExitStack() as stack:
        tails = (random.Random(number).choices(range(5, 4096), k=20) for number in range(2 * MAX_SEQUENCES))
        where = Counter(stack.enter_context(held(replicas, common + tail))[0] for tail in tails)
    assert [*where.values()] == [MAX_SEQUENCES] * 2
    wait_idle(replicas)


@contextmanager
def watched(server: Server) -> Iterator[None]:
    """In the body, several threads ask for the status all the time."""
    enough = threading.Event()

    def watch() -> None:
        while not enough.is_set():
            server.status()

    with ThreadPoolExecutor(4) as pool:
        watching = [pool.submit(watch) for _ in range(4)]
        try:
            yield
        finally:
            enough.set()
    for each in watching:
        each.result()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_prefix_is_not_waited_for_where_another_replica_is_idle(replicas: Server) -> None:
    wait_for_replicas(replicas, 2)
    for topic in range(50, 54):
        with watched(replicas), ExitStack() as stack:
            where = [stack.enter_context(held(replicas, prompt(topic)))[0] for _ in range(MAX_SEQUENCES + 2)]
        assert len(set(where[: MAX_SEQUENCES + 1])) == 1, "as many more than the others have as are decoded at a time"
        assert where[-1] != where[0]
        wait_idle(replicas)


class Client(threading.Thread):
    """Sends one request after another until it is told to stop; `answers` says which came back whole and right."""

    def __init__(self, server: Server, tokens: list[int]) -> None:
        super().__init__(daemon=True)
        self.server, self.tokens, self.expected = server, tokens, text_of(server, tokens)
        self.answers: list[bool] = []
        self.enough = threading.Event()

    def run(self) -> None:
        while not self.enough.is_set():
            self.answers.append(text_of(self.server, self.tokens) == self.expected)

    def stop(self) -> None:
        self.enough.set()
        self.join()


def text_of(server: Server, tokens: list[int]) -> str | None:
    answer = server.complete(tokens, max_tokens=24, temperature=1.0, seed=7)
    return str(answer.json()["choices"][0]["text"]) if answer.status_code == 200 else None


def targets() -> list[Any]:
    """The target actors in the cluster."""
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    return [ray.get_actor(**each) for each in named if each["name"].endswith("-target")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_replica_is_added_under_load_and_removed_after_it(replicas: Server) -> None:
    wait_for_replicas(replicas, 2)
    clients = [Client(replicas, prompt(topic)) for topic in range(12)]
    for client in clients:
        client.start()
    try:
        wait_for_replicas(replicas, 3, timeout_s=240)
        served = sum(len(client.answers) for client in clients)
        while sum(len(client.answers) for client in clients) < served + 48:  # the third one serves, too
            time.sleep(0.1)
    finally:
        for client in clients:
            client.stop()
    trickle = Client(replicas, prompt(0))
    with ExitStack() as stack:
        streams: dict[str, requests.Response] = {}  # one on each replica
        for topic in range(200, 300):
            replica, stream = stack.enter_context(held(replicas, prompt(topic)))
            if streams.setdefault(replica, stream.result()) is not stream.result():
                stream.result().close()
            if len(streams) == 3:
                break
        assert streams.keys() == live_by_replica(replicas).keys()
        trickle.start()
        wait_for_replicas(replicas, 2)
        [removed] = streams.keys() - live_by_replica(replicas).keys()
        assert len(targets()) == 3, "it is still at its last request"
        for replica in streams.keys() - {removed}:
            streams[replica].close()
        lines = [line for line in streams[removed].iter_lines() if line.startswith(b"data: ")]
        assert lines[-1] == b"data: [DONE]"
        assert json.loads(lines[-2].removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
    until = time.monotonic() + 60
    while len(targets()) > 2:
        assert time.monotonic() < until, "the pipeline outlives its replica"
        time.sleep(0.2)
    trickle.stop()
    assert all(all(client.answers) for client in (*clients, trickle)), [client.answers for client in clients]
    assert trickle.answers, "somebody has gone on all the time"
    wait_idle(replicas)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hung_target_is_replaced_in_place_and_its_streams_go_on(replicas: Server) -> None:
    import ray

    wait_for_replicas(replicas, 2)
    before = live_by_replica(replicas).keys()
    with held(replicas, prompt(300)) as (hung, stream):
        lines = stream.result().iter_lines()
        next(lines)
        look = [
            each.__ray_call__.remote(lambda actor: (os.getpid(), actor.tier_status().live_sequences))
            for each in targets()
        ]
        [pid] = [pid for pid, live in ray.get(look, timeout=30) if live]
        os.kill(pid, signal.SIGSTOP)
        try:
            ready = {t["replica"]: t["ready"] for t in replicas.status()["tiers"] if t["tier"] == "target"}
            assert sorted(ready.values()) == [False, True]
            assert not ready[hung]
            answers = [requests.get(f"{replicas.url}/health", timeout=20).status_code for _ in range(4)]
            assert answers == [200] * 4, "the other replica can serve, whichever of them is asked"
            until = time.monotonic() + 120
            while os.path.exists(f"/proc/{pid}/exe"):
                assert time.monotonic() < until, "it is killed"
                time.sleep(0.2)
        finally:
            if os.path.exists(f"/proc/{pid}/exe"):
                os.kill(pid, signal.SIGCONT)
        more = [next(lines) for _ in range(200)]
        assert not any(b'"error"' in line for line in more), "its streams go on"
    until = time.monotonic() + 120
    while not all(t["ready"] for t in replicas.status()["tiers"]):
        assert time.monotonic() < until, "it does not come back"
        time.sleep(0.3)
    assert live_by_replica(replicas).keys() == before, "its replica is the same"
    wait_idle(replicas)
