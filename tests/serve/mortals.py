"""A server whose processes are killed, streams of every kind to it, and what their readers must get in the end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import requests

from tests.serve.conftest import Server, free_ports, start
from tests.starting import tried_twice
from triforce_core.client import TriForceClient

TITLES = {
    "target": "TargetActor",
    "retrieval": "RetrievalActor",
    "draft": "DraftActor",
    "replica": "ServeReplica:triforce:pipeline",
    "gateway": "ServeReplica:triforce:gateway",
    "front": "haproxy",
}
REFRESH_EVERY = 24  # tokens
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
Body = dict[str, Any]


@contextmanager
def mortal(folder: Path, environment: dict[str, str] | None = None, **server: Any) -> Iterator[Server]:
    """A server of its own. At the end it is told to stop, and nothing of it may be left."""
    config, log = folder / "config.yaml", folder / "log.txt"
    port, grpc_port = free_ports(2)
    settings = {
        "retrieval": {"budget": 256, "refresh_every": REFRESH_EVERY},
        "server": {"port": port, "grpc_port": grpc_port, **server},
    }
    config.write_text(json.dumps(settings))
    before = dict(os.environ)
    os.environ.update(environment or {})
    try:
        process = tried_twice(lambda: start(config, log))
    finally:
        os.environ.clear()
        os.environ.update(before)
    seen: set[psutil.Process] = set()
    try:
        yield Server(port, grpc_port, process)
        seen |= set(psutil.Process(process.pid).children(recursive=True))
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, log.read_text()
    finally:
        if process.poll() is None:
            seen |= set(psutil.Process(process.pid).children(recursive=True))
            process.kill()
        _, left = psutil.wait_procs(seen, timeout=15)
        for each in left:
            each.kill()
    assert not left, f"left behind: {left}"


def process_of(server: Server, victim: str) -> psutil.Process | None:
    """The process that now has the title of this victim; None if there is none."""
    for each in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if each.status() != psutil.STATUS_ZOMBIE and TITLES[victim] in " ".join(each.cmdline()):
                return each
    return None


def send(server: Server, victim: str, with_signal: signal.Signals = signal.SIGKILL) -> bool:
    """Send the signal. Return whether there was a process to send it to."""
    process = process_of(server, victim)
    if process is None:
        return False
    process.send_signal(with_signal)
    return True


@dataclass
class Streamed:
    """What the reader of one stream has in the end."""

    texts: dict[int, str] = field(default_factory=dict)  # by choice
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: Any = None  # but for the cached tokens: which KV a server has kept says nothing of the answer
    gap_s: float = 0.0  # longest time between two events
    first_s: float = 0.0  # until the first event

    def law(self) -> tuple[Any, ...]:
        """All but times."""
        return self.texts, self.tokens, self.logprobs, self.reasons, self.usage

    def equals(self, other: Streamed) -> bool:
        """Whether both streams gave the same, logprobs bit for bit, apart from times."""
        return self.law() == other.law()


def without_cached(usage: Any) -> Any:
    return usage and {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


Watch = Callable[[int], None]  # called with the number of tokens so far, from the stream's thread


def over_http(server: Server, body: Body, watch: Watch = lambda count: None) -> Streamed:
    fields = {**body, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    found, moment, count = Streamed(), time.monotonic(), 0
    began = moment
    with requests.post(f"{server.url}/v1/completions", json=fields, stream=True, timeout=600) as answer:
        assert answer.status_code == 200, answer.text
        last = b""
        for line in answer.iter_lines():
            if not line.startswith(b"data: "):
                continue
            last = line
            if line == b"data: [DONE]":
                break
            event = json.loads(line.removeprefix(b"data: "))
            assert "error" not in event, event
            now = time.monotonic()
            found.first_s = found.first_s or now - began
            found.gap_s, moment = max(found.gap_s, now - moment), now
            found.usage = without_cached(event.get("usage")) or found.usage
            for choice in event["choices"]:
                count += take(found, choice)
            watch(count)
    assert last == b"data: [DONE]", "a stream ends with [DONE]"
    return found


def take(found: Streamed, choice: dict[str, Any]) -> int:
    index = choice["index"]
    found.texts[index] = found.texts.get(index, "") + choice["text"]
    tokens = choice.get("token_ids") or []
    found.tokens.setdefault(index, []).extend(tokens)
    found.logprobs.setdefault(index, []).extend((choice.get("logprobs") or {}).get("token_logprobs") or [])
    if choice.get("finish_reason"):
        found.reasons[index] = choice["finish_reason"]
    return len(tokens)


def over_grpc(server: Server, body: Body, watch: Watch = lambda count: None) -> Streamed:
    """Read a stream by the SDK. It has one choice."""
    found, moment = Streamed({0: ""}, {0: []}, {0: []}), time.monotonic()
    began = moment
    with TriForceClient(server.grpc_address, timeout_s=600, retries=100) as client:
        for chunk in client.stream(**body):
            now = time.monotonic()
            found.first_s = found.first_s or now - began
            found.gap_s, moment = max(found.gap_s, now - moment), now
            found.texts[0] += chunk.text
            found.tokens[0] += chunk.token_ids
            found.logprobs[0] += [each.logprob for each in chunk.logprobs]
            if chunk.usage:
                found.usage, found.reasons[0] = replace(chunk.usage, cached_tokens=0), str(chunk.finish_reason)
            watch(len(found.tokens[0]))
    return found


def every_kind(prompt: list[int], temperature: float, max_tokens: int) -> list[tuple[Callable[..., Streamed], Body]]:
    """Streams over HTTP and gRPC: with logprobs, a penalty and two choices, a schema, and none of these."""
    common = {"prompt": prompt, "temperature": temperature, "seed": 5, "max_tokens": max_tokens}
    return [
        (over_http, {**common, "logprobs": 2, "ignore_eos": True}),
        (over_http, {**common, "n": 2, "frequency_penalty": 0.6}),
        (over_http, {**common, "guided_json": SCHEMA}),
        (over_grpc, {**common, "logprobs": 1}),
    ]


def together(
    server: Server, asked: list[tuple[Callable[..., Streamed], Body]], watch: Watch = lambda count: None
) -> list[Streamed]:
    """All streams at the same time; `watch` sees the first."""
    with ThreadPoolExecutor(len(asked)) as pool:
        streams = [
            pool.submit(send_it, server, body, *((watch,) if not index else ()))
            for index, (send_it, body) in enumerate(asked)
        ]
        return [stream.result() for stream in streams]


def target_status(server: Server) -> dict[str, Any] | None:
    """What the only target says about itself; None if nobody answers."""
    with suppress(requests.RequestException, AssertionError):
        for tier in server.status()["tiers"]:
            if tier["tier"] == "target":
                found: dict[str, Any] = tier
                return found
    return None


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 300.0) -> float:
    """Wait until the condition holds, and return the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, what
        time.sleep(0.1)
    return time.monotonic() - began


def wait_idle(server: Server) -> None:
    """Nothing is held by any tier, and no slot of the pool is owned."""

    def idle() -> bool:
        with suppress(requests.RequestException, AssertionError):
            status = server.status()
            tiers = status["tiers"]
            held = [tier["live_sequences"] for tier in tiers] + [tier.get("kv_tokens", 0) for tier in tiers]
            return len(tiers) == 3 and not any(held) and not status["in_flight"]
        return False

    wait_until(idle, "something is still held", 60)
