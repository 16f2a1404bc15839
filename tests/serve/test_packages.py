"""What users install: the wheels of `make dist` in an empty environment, served from a folder without the source."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.packages import REPOSITORY, empty_environment, make_dist
from tests.serve.conftest import Server, free_ports, start, stop
from tests.starting import LocalRay, tried_twice


def first_request(port: int, folder: Path) -> str:
    """README's first request, for a server on this port; its file is in `folder`."""
    (block,) = (each for each in re.findall(r"```bash\n(.*?)```", readme(), re.DOTALL) if "curl" in each)
    for ours, theirs in (("http://127.0.0.1:8000", f"http://127.0.0.1:{port}"), ("/tmp/", f"{folder}/")):
        assert ours in block
        block = block.replace(ours, theirs)
    return block


def readme() -> str:
    return (REPOSITORY / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_installed_server_answers_readme_s_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_ray: LocalRay
) -> None:
    local_ray.end()
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    built = make_dist(tmp_path / "source")
    python = empty_environment(tmp_path, f"triforce-serve[server] @ {built.wheel.as_uri()}", str(built.demo_wheel))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    where = "from triforce_core.demo import weights_dir; import actors, deploy; print(weights_dir('target'))"
    weights = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    assert weights.startswith(str(python.parents[1]))
    config, log = elsewhere / "triforce.yaml", elsewhere / "log.txt"
    port, grpc_port = free_ports(2)
    config.write_text(f"server: {{port: {port}, grpc_port: {grpc_port}}}\n")
    server = Server(port, grpc_port, tried_twice(lambda: start(config, log, [str(python.with_name("triforce"))])))
    try:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", first_request(port, elsewhere)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    finally:
        stop(server, log)
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", done.stdout
    text = "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])
    print(log.read_text(), text, sep="\n")
    assert len(text) > 128
