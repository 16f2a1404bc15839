"""The Dockerfile, what is sent to be built, and the Compose files, as far as they can be read without an engine."""

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
from tests.dockerfile import DOCKERFILE, REPOSITORY, context, image, in_context
from triforce_core import __version__
from triforce_core.config import Settings, load_settings

TOOLS = Path(sys.executable).parent
VARIANTS = ("cuda", "cpu")
COMPOSE = (REPOSITORY / "compose.yaml", REPOSITORY / "compose.gpu.yaml")
STOP_S = 30.0  # what a server needs to end once nothing is in flight
each_variant = pytest.mark.parametrize("variant", VARIANTS)
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def output_of(*command: Any) -> tuple[int, str]:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


# --- The Dockerfile


def test_hadolint_finds_nothing() -> None:
    assert output_of(TOOLS / "hadolint", "--failure-threshold=style", DOCKERFILE) == (0, "")


@each_variant
def test_the_base_image_is_an_exact_version_of_a_python_that_we_support(variant: str) -> None:
    external = {image(variant).external, image(variant, "packages").external}
    assert len(external) == 1, "an environment works only with the Python that it was made with"
    (version,) = re.findall(r"^python:(\d+\.\d+\.\d+)-slim-\w+$", external.pop())
    assert version in SpecifierSet(PROJECT["requires-python"])


@each_variant
def test_the_command_serves_on_the_ports_that_are_exposed_whatever_the_settings_say(
    variant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[Settings] = []
    monkeypatch.setattr(app, "run", served.append)
    (tmp_path / "triforce.yaml").write_text("server: {host: 127.0.0.1, port: 1234}\nmax_sequences: 3\n")
    built = image(variant)
    program, *arguments = built.cmd
    assert program in PROJECT["scripts"]
    assert run(monkeypatch, *(str(tmp_path / "triforce.yaml") if "/" in each else each for each in arguments)) == 0
    [settings] = served
    assert (settings.server.host, settings.max_sequences) == ("0.0.0.0", 3)
    assert [settings.server.port, settings.server.grpc_port] == built.ports
    assert f"http://127.0.0.1:{settings.server.port}/health" in " ".join(built.health_command)


@each_variant
def test_without_a_file_of_settings_the_variant_says_where_the_demo_runs(variant: str) -> None:
    [copied] = [each.rest for each in image(variant).steps if each.rest.endswith(".yaml")]
    source, target = copied.split()
    assert target in image(variant).cmd
    settings = load_settings(REPOSITORY / source)
    assert (settings.device_type, settings.target.model) == (variant, "demo")


@each_variant
def test_the_image_runs_as_a_user_that_kubernetes_knows_is_not_root(variant: str) -> None:
    user, group = (int(number) for number in image(variant).user.split(":"))
    assert user > 0
    assert group > 0
    [made] = [each.text for each in image(variant).steps if "useradd" in each.text]
    assert f"--uid {user} " in made


@each_variant
def test_the_labels_tell_this_version_and_licence(variant: str) -> None:
    named = {key.removeprefix("org.opencontainers.image."): text for key, text in image(variant).labels.items()}
    assert (named["version"], named["licenses"]) == (__version__, PROJECT["license"])


def test_only_the_cuda_image_has_a_compiler() -> None:
    """Triton needs one when it compiles a kernel."""
    ran = {variant: " ".join(e.text for e in image(variant).steps if e.name == "RUN") for variant in VARIANTS}
    assert ["g++" in ran[variant] for variant in VARIANTS] == [True, False]


# --- What is sent to the engine


def test_all_that_the_dockerfile_copies_is_sent_and_nothing_else() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.splitlines()
    copied = {
        source
        for variant in VARIANTS
        for stage in ("packages", "")
        for each in image(variant, stage).steps
        if each.name == "COPY" and "from" not in each.options
        for source in each.rest.split()[:-1]
    }
    wanted = {path for path in tracked if any(f"{path}/".startswith(f"{each}/") for each in copied)}
    assert copied <= {parent for path in wanted for parent in [path, *map(str, Path(path).parents)]}, "all exist"
    sent = set(context())
    assert sent == wanted - {"deploy/Dockerfile"}
    for path in (".git/config", ".venv/bin/python", "tests/conftest.py", "triforce_core/__pycache__/a.pyc", "a.yaml"):
        assert not in_context(path), path


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
    service, built = composed(*files), image(variant)
    assert service["image"] == f"triforce-serve:{__version__}-{variant}"
    assert service["build"] == {"context": ".", "dockerfile": "deploy/Dockerfile", "args": {"VARIANT": variant}}
    assert service["ports"] == [f"127.0.0.1:{port}:{port}" for port in built.ports]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.keys() & {"privileged", "cap_add", "user", "network_mode", "pid", "ipc", "healthcheck"}
    assert built.health_command, "which Compose takes over, as it does the user"


@each_machine
def test_compose_mounts_what_the_image_writes_and_models_and_settings_to_be_read(
    variant: str, files: tuple[Path, ...]
) -> None:
    service, built = composed(*files), image(variant)
    volumes = service["volumes"]
    assert service["tmpfs"] == ["/tmp"]
    assert not volumes.pop(built.env["HOME"]).endswith(":ro")
    assert all(volume.endswith(":ro") for volume in volumes.values())
    [path] = volumes.keys() - {"/models"}
    assert path in built.cmd
    assert load_settings(REPOSITORY / volumes[path].split(":")[0]).device_type == variant
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
