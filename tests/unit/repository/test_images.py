"""The Dockerfile and the Compose files, as far as they can be read without an engine; tests/image runs the image."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

from deploy import app
from tests.command_line import run
from triforce_core import __version__
from triforce_core.config import Settings, load_settings

REPOSITORY = Path(__file__).resolve().parents[3]
DOCKERFILE = REPOSITORY / "deploy/Dockerfile"
TEXT = DOCKERFILE.read_text()
TOOLS = Path(sys.executable).parent
SETTINGS, HOME = "/etc/triforce/triforce.yaml", "/home/triforce"
COMPOSE = (REPOSITORY / "compose.yaml", REPOSITORY / "compose.gpu.yaml")
STOP_S = 30.0  # what a server needs to end once nothing is in flight
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def output_of(*command: Any) -> tuple[int, str]:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


# --- The Dockerfile


def test_hadolint_finds_nothing() -> None:
    assert output_of(TOOLS / "hadolint", "--failure-threshold=style", DOCKERFILE) == (0, "")


def test_every_stage_stands_on_one_exact_version_of_a_python_that_we_support() -> None:
    """An environment works only with the Python that it was made with."""
    [version] = set(re.findall(r"^FROM python:(\d+\.\d+\.\d+)-slim-trixie\b", TEXT, re.MULTILINE))
    assert version in SpecifierSet(PROJECT["requires-python"])
    assert TEXT.count("FROM python:") == TEXT.count(f"FROM python:{version}-slim-trixie")


def test_nothing_in_it_needs_a_builder_of_this_year() -> None:
    """Docker 24 and Debian 12's buildah know no `--start-interval`, and a `# syntax` line asks Docker Hub."""
    assert "--start-interval" not in TEXT
    assert "syntax=" not in TEXT


def test_the_command_serves_on_the_ports_that_are_exposed_whatever_the_settings_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[Settings] = []
    monkeypatch.setattr(app, "run", served.append)
    (tmp_path / "triforce.yaml").write_text("server: {host: 127.0.0.1, port: 1234}\nmax_sequences: 3\n")
    [command] = re.findall(r"^CMD (\[.*\])$", TEXT, re.MULTILINE)
    program, *arguments = yaml.safe_load(command)
    assert program in PROJECT["scripts"]
    own = (str(tmp_path / "triforce.yaml") if each == SETTINGS else each for each in arguments)
    assert run(monkeypatch, *own) == 0
    [settings] = served
    assert (settings.server.host, settings.max_sequences) == ("0.0.0.0", 3)
    assert f"EXPOSE {settings.server.port} {settings.server.grpc_port}\n" in TEXT
    assert f"http://127.0.0.1:{settings.server.port}/health" in TEXT


@pytest.mark.parametrize("variant", ["cuda", "cpu"])
def test_without_a_file_of_settings_the_variant_says_where_the_demo_runs(variant: str) -> None:
    assert f"COPY deploy/settings/${{VARIANT}}.yaml {SETTINGS}\n" in TEXT
    settings = load_settings(REPOSITORY / f"deploy/settings/{variant}.yaml")
    assert (settings.device_type, settings.target.model) == (variant, "demo")


def test_the_labels_tell_this_version_and_licence() -> None:
    assert f"ARG VERSION={__version__}\n" in TEXT
    assert f'org.opencontainers.image.licenses="{PROJECT["license"]}"' in TEXT


# --- Compose


def composed(*files: Path) -> dict[str, Any]:
    """The service as Compose sees it with these files, with the default of each variable: later files add to mappings,
    and replace other values and the volumes of the same path.
    """

    def merge(one: Any, other: Any) -> Any:
        if isinstance(one, dict) and isinstance(other, dict):
            return one | {key: merge(one[key], value) if key in one else value for key, value in other.items()}
        return other

    result: dict[str, Any] = {}
    for file in files:
        text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", file.read_text())
        [service] = yaml.safe_load(text)["services"].values()
        service["volumes"] = {each.split(":")[1]: each for each in service["volumes"]}
        result = merge(result, service)
    return result


def seconds(text: str) -> float:
    units = {"h": 3600, "m": 60, "s": 1}
    found = re.findall(r"(\d+)([hms])", text)
    assert "".join(map("".join, found)) == text
    return sum(float(number) * units[unit] for number, unit in found)


each_machine = pytest.mark.parametrize(("variant", "files"), [("cpu", COMPOSE[:1]), ("cuda", COMPOSE)])


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.name)
def test_compose_files_obey_the_specification(file: Path) -> None:
    assert output_of(TOOLS / "check-jsonschema", "--builtin-schema=vendor.compose-spec", file)[0] == 0


@each_machine
def test_compose_runs_the_image_of_this_version_confined_and_on_the_loopback_alone(
    variant: str, files: tuple[Path, ...]
) -> None:
    service = composed(*files)
    assert service["image"] == f"triforce-serve:{__version__}-{variant}"
    assert service["build"] == {"context": ".", "dockerfile": "deploy/Dockerfile", "args": {"VARIANT": variant}}
    assert service["ports"] == ["127.0.0.1:8000:8000", "127.0.0.1:9000:9000"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.keys() & {"privileged", "cap_add", "user", "network_mode", "pid", "ipc", "healthcheck"}
    # Compose takes over the image's health check, and its user.


@each_machine
def test_compose_mounts_what_the_image_writes_and_models_and_settings_to_be_read(
    variant: str, files: tuple[Path, ...]
) -> None:
    service = composed(*files)
    volumes = service["volumes"]
    assert service["tmpfs"] == ["/tmp"]
    assert not volumes.pop(HOME).endswith(":ro")
    assert all(volume.endswith(":ro") for volume in volumes.values())
    assert volumes.keys() == {"/models", SETTINGS}
    assert load_settings(REPOSITORY / volumes[SETTINGS].split(":")[0]).device_type == variant
    devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    assert [each["count"] for each in devices] == ([1] if variant == "cuda" else [])


@each_machine
def test_compose_lets_ray_s_object_store_lie_in_shared_memory(variant: str, files: tuple[Path, ...]) -> None:
    """This holds however much memory the machine has: above this size Ray makes the store fit."""
    from ray._private.ray_constants import REQUIRE_SHM_SIZE_THRESHOLD

    gigabytes = composed(*files)["shm_size"].removesuffix("gb")
    assert 0.95 * int(gigabytes) * 2**30 >= REQUIRE_SHM_SIZE_THRESHOLD


@each_machine
def test_compose_waits_for_as_long_as_the_server_drains(variant: str, files: tuple[Path, ...]) -> None:
    service = composed(*files)
    [mounted] = [volume for path, volume in service["volumes"].items() if path.endswith(".yaml")]
    drain_s = load_settings(REPOSITORY / mounted.split(":")[0]).server.drain_s
    assert seconds(service["stop_grace_period"]) >= drain_s + STOP_S
