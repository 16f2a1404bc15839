"""The server ends soon after Ray has died, whatever it is doing, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.starting import LocalRay, tried_twice

ENDS_WITHIN_S = 10.0
WITH_RAY = """
import time
from deploy.app import local_ray
from deploy.remains import nothing_remains
from triforce_core.config import load_settings
with nothing_remains(), local_ray(load_settings(dtype="float32")):
    print("started", flush=True)
    time.sleep(300)
"""


def started() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_RAY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    if [process.stdout.readline(), process.stdout.readline()] == ["starting Ray\n", "started\n"]:
        return process
    raise RuntimeError(process.communicate()[1])


@pytest.mark.parametrize(
    ("killed", "named"), [("an agent", "raylet"), pytest.param("gcs_server", "gcs_server", marks=pytest.mark.ci)]
)
def test_the_server_ends_with_ray(local_ray: LocalRay, killed: str, named: str) -> None:
    local_ray.end()
    with tried_twice(started) as process:
        try:
            ray = {each.name(): each for each in psutil.Process(process.pid).children()}
            everything = psutil.Process(process.pid).children(recursive=True)
            # The raylet starts its agents first, and ends with each of them.
            (ray.get(killed) or ray["raylet"].children()[0]).kill()
            _, said = process.communicate(timeout=ENDS_WITHIN_S)
        finally:
            process.kill()
    assert process.returncode == 1
    assert said.startswith(f"triforce: Ray has died: its {named} has ended; see /")
    assert said.count("\n") == 1
    _, left = psutil.wait_procs(everything, timeout=5)
    assert not left, left
