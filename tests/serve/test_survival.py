"""Streams of a running server whose processes are killed: what their readers get in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.serve.conftest import Server, free_ports, start
from tests.starting import LocalRay
from triforce_core.client import Chunk, TriForceClient
from triforce_core.errors import TriForceError

PROMPT, ASKED = "def main():", {"max_tokens": 400, "temperature": 0.8, "seed": 3}
LONG = {"max_tokens": 12_000, "ignore_eos": True}  # takes minutes


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory, local_ray: LocalRay) -> Iterator[Server]:
    """A server of its own, whose processes may be killed."""
    local_ray.end()
    folder = tmp_path_factory.mktemp("mortal")
    config, log = folder / "config.yaml", folder / "log.txt"
    port, grpc_port = free_ports(2)
    config.write_text(json.dumps({"dtype": "float32", "server": {"port": port, "grpc_port": grpc_port}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.serve.conftest.START_S", 300.0)
        running = Server(port, grpc_port, start(config, log))
    yield running
    started = psutil.Process(running.process.pid).children(recursive=True)
    running.process.send_signal(signal.SIGTERM)
    try:
        running.process.wait(60)
    except subprocess.TimeoutExpired:
        running.process.kill()
    for each in started:
        if each.is_running():
            each.kill()


def process_of(server: Server, title: str) -> psutil.Process:
    """The process that has `title` in its title. Ray gives such titles to the processes of its actors."""
    found = [
        each
        for each in psutil.Process(server.process.pid).children(recursive=True)
        if title in "".join(Path(f"/proc/{each.pid}/cmdline").read_text())
    ]
    [process] = found
    return process


BETWEEN = ("ServeReplica:triforce:gateway", "haproxy")  # what stands between clients and replicas


def killed(server: Server, title: str) -> Callable[[], None]:
    return lambda: os.kill(process_of(server, title).pid, signal.SIGKILL)


def streamed(server: Server, kill: Callable[[], None] | None = None, **fields: Any) -> tuple[str, Any]:
    """The text and usage of a stream over HTTP; `kill` is called when some of it has come."""
    asked = {"prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}, **ASKED, **fields}
    answer = requests.post(f"{server.url}/v1/completions", json=asked, stream=True, timeout=300)
    text, usage, done = "", None, False
    for line in answer.iter_lines():
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]":
            done = True
            continue
        event = json.loads(line.removeprefix(b"data: "))
        assert "error" not in event, event
        text += "".join(choice["text"] for choice in event["choices"])
        usage = event.get("usage") or usage
        if kill is not None and len(text) > 40:
            kill, _ = None, kill()
    assert done, "it ends with [DONE], or the connection breaks"
    return text, usage


def asked_by_sdk(client: TriForceClient, kill: Callable[[], None] | None = None, **fields: Any) -> list[Chunk]:
    chunks = []
    for chunk in client.stream(PROMPT, logprobs=0, **{**ASKED, **fields}):
        chunks.append(chunk)
        if kill is not None and len(chunks) > 10:
            kill, _ = None, kill()
    return chunks


def whole(chunks: list[Chunk]) -> tuple[Any, ...]:
    """All but the cached tokens, which say what KV a server has kept: a call that goes on finds its own."""
    return (
        "".join(chunk.text for chunk in chunks),
        [token for chunk in chunks for token in chunk.token_ids],
        len([each for chunk in chunks for each in chunk.logprobs]),
        [(replace(chunk.usage, cached_tokens=0), chunk.finish_reason) for chunk in chunks if chunk.usage],
        [chunk.seed for chunk in chunks if chunk.seed is not None],
    )


def wait_until_served(server: Server, timeout_s: float = 300) -> None:
    until = time.monotonic() + timeout_s
    while True:
        try:
            if requests.get(f"{server.url}/health", timeout=20).status_code == 200:
                return
        except requests.RequestException:
            pass
        assert time.monotonic() < until, "it is not back"
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_streams_outlive_their_replica_and_the_sdk_its_gateway(mortal: Server) -> None:
    with TriForceClient(mortal.grpc_address, timeout_s=500, retries=40) as client:
        text, usage = streamed(mortal)
        undisturbed = whole(asked_by_sdk(client))
        assert undisturbed[0] == text
        # The replica, under an HTTP stream and one of the SDK at once.
        answers: list[Any] = []
        reader = threading.Thread(target=lambda: answers.append(whole(asked_by_sdk(client))))
        reader.start()
        began = time.monotonic()
        assert streamed(mortal, killed(mortal, "ServeReplica:triforce:pipeline")) == (text, usage)
        print(f"\nthe replica: {time.monotonic() - began:.1f} s")
        reader.join()
        assert answers == [undisturbed]
        # The gateway and the front: the SDK goes on, an HTTP stream breaks.
        for dead in BETWEEN:
            began = time.monotonic()
            assert whole(asked_by_sdk(client, killed(mortal, dead))) == undisturbed
            print(f"{dead}: {time.monotonic() - began:.1f} s")
            wait_until_served(mortal)
            with pytest.raises((requests.RequestException, AssertionError), match=r"\[DONE\]|[Cc]onnection|ended"):
                streamed(mortal, killed(mortal, dead))
            wait_until_served(mortal)
        mortal.wait_idle(60)


def broken_over_http(server: Server, kill: Callable[[], None]) -> None:
    with pytest.raises((requests.RequestException, AssertionError), match=r"\[DONE\]|[Cc]onnection|ended"):
        streamed(server, kill, **LONG)


def broken_over_grpc(server: Server, kill: Callable[[], None]) -> None:
    with TriForceClient(server.grpc_address, retries=0) as client, pytest.raises(TriForceError):
        asked_by_sdk(client, kill, **LONG)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dead", BETWEEN)
@pytest.mark.parametrize("broken", [broken_over_http, broken_over_grpc])
def test_nothing_is_decoded_for_a_dead_gateway_or_front(
    mortal: Server, broken: Callable[[Server, Callable[[], None]], None], dead: str
) -> None:
    wait_until_served(mortal)
    broken(mortal, killed(mortal, dead))
    killed_at = time.monotonic()
    wait_until_served(mortal)
    mortal.wait_idle(20)
    print(f"\n{dead}: idle {time.monotonic() - killed_at:.1f} s after it was killed")
