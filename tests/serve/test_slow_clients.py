"""2,000 slow connections of five kinds beside clients with keys, who must not notice them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests

from tests.serve.conftest import Server, free_ports
from tests.serve.mortals import mortal
from tests.starting import LocalRay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KEY = "a-key-of-the-test"
EACH, ATTACK_S, CLIENTS = 400, 60.0, 4
PROGRAM = [sys.executable, "-m", "tests.slow_clients"]


def asked(server: Server, until: float) -> list[float]:
    """The seconds that each of one client's requests took; each is answered."""
    times = []
    with requests.Session() as session:
        session.headers["authorization"] = f"Bearer {KEY}"
        while time.monotonic() < until:
            began = time.monotonic()
            body = {"prompt": "def main():", "max_tokens": 8, "temperature": 0}
            answer = session.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            times.append(time.monotonic() - began)
    return times


def p99_under_attack(server: Server, ports: list[int]) -> float:
    """The 99th percentile, in seconds, of requests to the server while others hold on to these ports."""
    attack = [*PROGRAM, *map(str, ports), str(EACH), str(ATTACK_S)]
    with subprocess.Popen(attack, stdout=subprocess.PIPE, text=True) as attacking:
        try:
            time.sleep(10)  # until all have come
            held = len([each for each in psutil.Process(attacking.pid).net_connections() if each.raddr])
            until = time.monotonic() + ATTACK_S - 15
            with ThreadPoolExecutor(CLIENTS) as pool:
                found = [pool.submit(asked, server, until) for _ in range(CLIENTS)]
                times = [each for one in found for each in one.result()]
            assert held == 5 * EACH
            print(attacking.communicate(timeout=60)[0], f"open after 10 s: {held}; {len(times)} requests")
        finally:
            attacking.kill()
    return statistics.quantiles(times, n=100)[98]


def test_those_with_keys_do_not_notice_slow_connections(tmp_path: Path, local_ray: LocalRay) -> None:
    local_ray.end()
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    elsewhere = free_ports(2)
    with mortal(tmp_path, api_keys=str(keys)) as server:
        with subprocess.Popen([*PROGRAM, "dummy", *map(str, elsewhere)], stdout=subprocess.PIPE, text=True) as dummy:
            try:
                assert dummy.stdout is not None
                assert dummy.stdout.readline() == "ready\n"
                before = p99_under_attack(server, elsewhere)
            finally:
                dummy.kill()
        under_attack = p99_under_attack(server, [server.port, server.grpc_port])
        print(json.dumps({"p99 in s": {"beside a dummy": before, "beside the server": under_attack}}))
        assert under_attack <= 2 * before
