"""A server under load for minutes: every stream is that of its request alone, and everything is given back."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.conftest import HeldOut
from tests.serve.conftest import Server, free_ports, start
from tests.starting import tried_twice
from triforce_core.building.assembly import local_engine
from triforce_core.building.inspection import runners_of
from triforce_core.config import load_settings
from triforce_core.engine.engine import Engine, run_to_end
from triforce_core.engine.sequence import Request
from triforce_core.kv.base import Forward
from triforce_core.messages import SamplingParams, SequenceSpec, Span, Tier
from triforce_core.models.files import stop_token_ids
from triforce_core.models.load import load_model
from triforce_core.sampling.draw import Draw, perturbed_logits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LIVE, QUEUED = 64, 64
SOAK_S, STORM_S = 300.0, 60.0
TIE = 1e-4  # of perturbed logits in float32: either token may be drawn
Tokens = tuple[int, ...]


@contextmanager
def serving(tmp_path: Path, **settings: Any) -> Iterator[Server]:
    """A server with these settings; it ends with the context, and leaves nothing behind."""
    config, log = tmp_path / "config.yaml", tmp_path / "log.txt"
    port, grpc_port = free_ports(2)
    lines = [f"{key}: {value}" for key, value in {"dtype": "float32", **settings}.items() if key != "server"]
    server = {"port": port, "grpc_port": grpc_port, **settings.get("server", {})}
    config.write_text("\n".join([*lines, f"server: {server}"]))
    process = tried_twice(lambda: start(config, log))
    started = psutil.Process(process.pid).children(recursive=True)
    try:
        yield Server(port, grpc_port, process)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        _, left = psutil.wait_procs(started, timeout=10)
        for each in left:
            each.kill()
    assert "Traceback" not in log.read_text(), log.read_text()
    assert not left, f"left behind: {left}"


def asked(index: int, text: Tokens) -> dict[str, Any]:
    """Requests of mixed lengths, temperatures, seeds and tiers."""
    length = (20, 150, 700, 2500)[index % 4] + 13 * (index % 11)
    body: dict[str, Any] = {
        "prompt": list(text[97 * index % 3000 :][:length]),
        "max_tokens": (30, 120, 400)[index % 3],
        "temperature": (0.0, 0.7, 1.0)[index % 3],
        "seed": index,
        "return_token_ids": True,
    }
    if index % 5 == 4:
        body["speculation"] = {"tiers": "target"}
    return body


def streamed(server: Server, body: dict[str, Any]) -> Tokens:
    """The tokens of a whole stream."""
    tokens: Tokens = ()
    with server.stream(**body) as response:
        assert response.status_code == 200, response.text
        lines = [line for line in response.iter_lines() if line.startswith(b"data: ")]  # others are comments
    assert lines[-1] == b"data: [DONE]"
    for line in lines[:-1]:
        chunk = json.loads(line.removeprefix(b"data: "))
        assert "error" not in chunk, chunk
        tokens += tuple(chunk["choices"][0]["token_ids"])
    return tokens


def kv_tokens(server: Server) -> int:
    found: int = next(tier["kv_tokens"] for tier in server.status()["tiers"] if tier["tier"] == "target")
    return found


def wait_for_empty_pool(server: Server) -> None:
    server.wait_idle(30)
    until = time.monotonic() + 10
    while kv_tokens(server):
        assert time.monotonic() < until, "KV is held for nobody"
        time.sleep(0.1)


class Alone:
    """The requests one by one, decoded plainly in this process."""

    def __init__(self) -> None:
        settings = load_settings(dtype="float32", max_sequences=1, speculation={"tiers": "target"})
        self.engine: Engine = local_engine(load_model("demo", "target", "float32", "cpu"), None, settings)
        self.runner = runners_of(self.engine)[Tier.TARGET]
        self.stops = stop_token_ids("demo")

    def request(self, body: dict[str, Any]) -> Request:
        sampling = SamplingParams(body["temperature"])
        return Request(tuple(body["prompt"]), body["max_tokens"], sampling, body["seed"], (0, 0), self.stops)

    def tokens(self, body: dict[str, Any]) -> Tokens:
        return tuple(token for output in run_to_end(self.engine, [self.request(body)]) for token in output.tokens)

    def gap(self, body: dict[str, Any], found: Tokens, expected: Tokens) -> float:
        """The difference of the perturbed logits of the two tokens at which the outputs part."""
        at = next(i for i, (a, b) in enumerate(zip((*found, -1), (*expected, -1), strict=False)) if a != b)
        if at >= min(len(found), len(expected)):
            return float("inf")
        request, common = self.request(body), found[:at]
        text = (*request.prompt, *common)
        spec = SequenceSpec(request.sampling, request.seed, len(request.prompt), len(text) + 1)
        logits, _ = self.runner.forward([Forward(Span(2**40, 0, text, spec), num_sampled=1)])
        self.runner.release([2**40])
        [perturbed] = perturbed_logits(logits, [Draw(request.sampling, request.seed, len(text))])
        return float((perturbed[expected[at]] - perturbed[found[at]]).abs())


def test_64_streams_for_five_minutes(tmp_path: Path, held_out: HeldOut) -> None:
    text = held_out("inspect.py", 6000)
    with serving(tmp_path, max_sequences=LIVE, server={"max_queued": QUEUED}) as server:
        wait_for_empty_pool(server)
        until, indices, lock = time.monotonic() + SOAK_S, iter(range(10**6)), threading.Lock()
        found: dict[int, Tokens] = {}

        def user() -> None:
            while time.monotonic() < until:
                with lock:
                    index = next(indices)
                found[index] = streamed(server, asked(index, text))

        with ThreadPoolExecutor(LIVE) as pool:
            for each in [pool.submit(user) for _ in range(LIVE)]:
                each.result()
        wait_for_empty_pool(server)
    alone = Alone()
    different = {i: tokens for i, tokens in found.items() if tokens != alone.tokens(asked(i, text))}
    print(f"\n{len(found)} streams, {sum(map(len, found.values()))} tokens, {len(different)} unlike their solo runs")
    assert len(found) > LIVE
    for index, tokens in different.items():
        assert alone.gap(asked(index, text), tokens, alone.tokens(asked(index, text))) < TIE


def test_a_pool_of_half_of_what_is_needed(tmp_path: Path, held_out: HeldOut) -> None:
    """As many requests live at once as fit at their present lengths. Preempted requests end with the same tokens."""
    text = held_out("turtle.py", 6000)
    bodies = [
        {
            "prompt": list(text[300 * n :][: 400 + 100 * n]),
            "max_tokens": 700,
            "temperature": (0.0, 0.8)[n % 2],
            "seed": n,
            "return_token_ids": True,
        }
        for n in range(8)
    ]
    needed = sum(len(body["prompt"]) + body["max_tokens"] for body in bodies)
    pool = needed // 2
    fit = 0
    while sum(len(body["prompt"]) + 256 for body in bodies[: fit + 1]) <= pool:
        fit += 1
    greatest = sum(sum(len(b["prompt"]) + b["max_tokens"] for b in bodies[: n + 1]) <= pool for n in range(8))
    target = f"{{context_length: {pool}, kv_pool_tokens: {pool}}}"
    with serving(tmp_path, max_sequences=8, target=target) as server:
        most = 0
        with ThreadPoolExecutor(8) as threads:
            answers = []
            for body in bodies:
                answers.append(threads.submit(server.complete, **body))
                time.sleep(0.05)  # so that they arrive in order
            while not all(answer.done() for answer in answers):
                tiers = server.status()["tiers"]
                most = max(most, *(tier["live_sequences"] for tier in tiers if tier["tier"] == "retrieval"))
                time.sleep(0.1)
        found = [answer.result() for answer in answers]
        assert [answer.status_code for answer in found] == [200] * 8
        wait_for_empty_pool(server)
    times = [answer.json()["triforce"]["preempted"] for answer in found]
    print(f"\npool {pool} of {needed} tokens, {most} live at once ({greatest} at their greatest), preempted {times}")
    assert most >= fit > greatest
    assert sum(times) >= 1
    assert max(times) <= 3
    alone = Alone()
    for body, answer in zip(bodies, found, strict=True):
        tokens, expected = tuple(answer.json()["choices"][0]["token_ids"]), alone.tokens(body)
        assert tokens == expected or alone.gap(body, tokens, expected) < TIE


def use(server: Server) -> tuple[int, int]:
    """Threads and open descriptors of the server and all of its processes."""
    own = psutil.Process(server.process.pid)
    every = [own, *own.children(recursive=True)]
    return sum(each.num_threads() for each in every), sum(each.num_fds() for each in every)


def test_clients_that_go_away_leave_nothing(tmp_path: Path) -> None:
    """A hundred streams are dropped after their first text."""
    body = {"prompt": "def main():", "max_tokens": 6000, "temperature": 0.0}

    def drop() -> None:
        with server.stream(**body) as response:
            assert next(response.iter_lines()).startswith(b"data: ")

    with serving(tmp_path, server={"max_queued": 8}) as server:
        for _ in range(20):  # threads and connections that stay are made by the first requests
            drop()
        wait_for_empty_pool(server)
        threads, descriptors = use(server)
        for _ in range(100):
            drop()
        wait_for_empty_pool(server)
        later = use(server)
        print(f"\nthreads {threads} before, {later[0]} after; descriptors {descriptors} before, {later[1]} after")
        assert later[0] <= threads + 3
        assert later[1] <= descriptors + 5


def test_ten_times_too_many_are_refused_and_do_not_slow_the_others(tmp_path: Path) -> None:
    """First there are as many users as places, then ten times as many. Refused users come back when they were
    told to.
    """
    places = 4 + 4
    body = {"prompt": "def main():", "max_tokens": 64, "temperature": 0.0}

    def storm(server: Server, users: int, seconds: float) -> tuple[list[float], dict[int, int]]:
        until, latencies, codes, lock = time.monotonic() + seconds, [], dict[int, int](), threading.Lock()

        def user() -> None:
            with requests.Session() as session:
                while (began := time.monotonic()) < until:
                    answer = session.post(f"{server.url}/v1/completions", json=body, timeout=60)
                    with lock:
                        codes[answer.status_code] = codes.get(answer.status_code, 0) + 1
                        if answer.status_code == 200:
                            latencies.append(time.monotonic() - began)
                    if answer.status_code == 429:
                        time.sleep(float(answer.headers["retry-after"]))

        with ThreadPoolExecutor(users) as pool:
            for each in [pool.submit(user) for _ in range(users)]:
                each.result()
        return sorted(latencies), codes

    with serving(tmp_path, max_sequences=4, server={"max_queued": 4}) as server:
        storm(server, places, 5)
        full, codes = storm(server, places, 30)
        assert set(codes) == {200}
        crowded, codes = storm(server, 10 * places, STORM_S)
        wait_for_empty_pool(server)
    half, ninety = ((full[int(share * len(full))], crowded[int(share * len(crowded))]) for share in (0.5, 0.9))
    print(f"\n{codes}; seconds at full admission and beyond: p50 {half}, p90 {ninety}")
    assert set(codes) == {200, 429}
    assert half[1] <= 2 * half[0]
    assert ninety[1] <= 2 * ninety[0]


def test_sigterm_under_load(tmp_path: Path) -> None:
    """What runs is finished, what is new gets 503, and the server ends well."""
    body = {"prompt": "def main():", "max_tokens": 400, "temperature": 0.0}
    with serving(tmp_path, server={"drain_timeout_s": 60}) as server, ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(lambda: [line for line in server.stream(**body).iter_lines() if line]) for _ in range(8)]
        until = time.monotonic() + 20
        while server.live()["target"] < 8:
            assert time.monotonic() < until
            time.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        refused = set[int]()
        while 503 not in refused and time.monotonic() < until:
            refused.add(server.complete(max_tokens=1).status_code)
        assert [each.result()[-1] for each in streams] == [b"data: [DONE]"] * 8
        assert refused <= {200, 503}
        assert 503 in refused
        assert server.process.wait(60) == 0
