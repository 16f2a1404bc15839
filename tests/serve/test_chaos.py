"""Random kills under load, and a request that kills the target each time: nobody else's output changes.

`CHAOS_S` in the environment says how many seconds the kills go on; by default 20 minutes.
"""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.conftest import HeldOut
from tests.serve import mortals
from tests.serve.conftest import Server
from tests.serve.mortals import TITLES, Body, Streamed, mortal, over_grpc, process_of, wait_idle
from tests.serve.poison.sitecustomize import DEADLY
from tests.starting import LocalRay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

CHAOS_S = float(os.environ.get("CHAOS_S", "1200"))
EVERY_S, STREAMS, SEED = 20.0, 8, 7
MORE_MEMORY, MORE_FILES, MORE_THREADS = 300 << 20, 60, 40  # that a process may have in the end, warmed up by the load
REQUESTS = [
    {"temperature": 0.0, "seed": 0, "max_tokens": 150},
    {"temperature": 0.8, "seed": 1, "max_tokens": 200},
    {"temperature": 0.8, "seed": 2, "max_tokens": 80, "json_schema": mortals.SCHEMA},
    {"temperature": 1.0, "seed": 3, "max_tokens": 120, "logprobs": 1},
]


def figures(server: Server) -> dict[str, tuple[int, int, int]]:
    """The memory, descriptors and threads of each process."""
    found = {}
    for victim in TITLES:
        if process := process_of(server, victim):
            found[victim] = process.memory_info().rss, process.num_fds(), process.num_threads()
    return found


def bodies(text: tuple[int, ...]) -> list[Body]:
    return [{"prompt": list(text[50 * i :][: 60 + 200 * i]), **fields} for i, fields in enumerate(REQUESTS)]


def client(server: Server, index: int, asked: list[Body], expected: list[Streamed], until: float) -> int:
    """Send one request after another; each answer must be whole and right. Return how many there were."""
    count = 0
    while time.monotonic() < until:
        which = (index + count) % len(asked)
        found = over_grpc(server, asked[which])
        assert found.equals(expected[which]), f"{found.law()} is not {expected[which].law()}"
        count += 1
    return count


@pytest.mark.parametrize("seed", [SEED])
def test_random_kills_lose_no_request_and_change_no_token(
    tmp_path: Path, local_ray: LocalRay, held_out: HeldOut, seed: int
) -> None:
    local_ray.end()
    with mortal(tmp_path) as server:
        asked = bodies(held_out("inspect.py", 3000))
        expected = [over_grpc(server, body) for body in asked]
        with ThreadPoolExecutor(STREAMS) as pool:  # what a load takes once, before the figures are read
            for future in [pool.submit(client, server, i, asked, expected, 0.0) for i in range(STREAMS)]:
                future.result()
            list(pool.map(lambda body: over_grpc(server, body), asked * 2))
        wait_idle(server)
        before, chance, kills = figures(server), random.Random(seed), []
        until, enough = time.monotonic() + CHAOS_S, threading.Event()

        def kill() -> None:
            while not enough.wait(EVERY_S) and time.monotonic() < until:
                victim = chance.choice(sorted(TITLES))
                kills.append((victim, mortals.send(server, victim)))

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            with ThreadPoolExecutor(STREAMS) as pool:
                clients = [pool.submit(client, server, i, asked, expected, until) for i in range(STREAMS)]
                counts = [each.result() for each in clients]
        finally:
            enough.set()
            killer.join()
        print(f"\n{kills}\n{sum(counts)} requests, of which none was lost or wrong")
        assert all(counts)
        mortals.wait_until(lambda: figures(server).keys() == before.keys(), "not all processes are back")
        wait_idle(server)
        after = figures(server)
        print(before, after, sep="\n")
        for victim, (memory, files, threads) in before.items():
            assert after[victim][0] < memory + MORE_MEMORY, victim
            assert after[victim][1] < files + MORE_FILES, victim
            assert after[victim][2] < threads + MORE_THREADS, victim


def test_a_request_that_kills_the_target_each_time_ends_alone(
    tmp_path: Path, local_ray: LocalRay, held_out: HeldOut
) -> None:
    """It ends after three tries. Other requests that were in its passes finish as if it had never come."""
    local_ray.end()
    poison = Path(__file__).parent / "poison"
    paths = [str(poison), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mortal(tmp_path, {"PYTHONPATH": os.pathsep.join(paths)}) as server:
        asked = bodies(held_out("inspect.py", 3000))
        expected = [over_grpc(server, body) for body in asked]
        with ThreadPoolExecutor(len(asked)) as pool:
            others = [pool.submit(over_grpc, server, body) for body in asked]
            time.sleep(0.5)
            answer = requests.post(
                f"{server.url}/v1/completions",
                json={"prompt": [*DEADLY, 5, 6, 7], "max_tokens": 20, "seed": 0},
                timeout=600,
            )
            found = [each.result() for each in others]
        error: Any = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (500, "engine_crash"), error
        assert all(one.equals(other) for one, other in zip(found, expected, strict=True))
        status = mortals.target_status(server)
        assert status is not None
        assert status["ready"]
        assert status["restarts"] == 3
        wait_idle(server)
        assert psutil.pid_exists(server.process.pid)
