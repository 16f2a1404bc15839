"""What a plain install may import, what the lock file holds, and what the wheel carries."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[2]

# Run in a fresh interpreter where every import fails but those of a plain install: grpcio (which needs
# typing-extensions), protobuf and ourselves.
PLAIN_INSTALL = """
import sys

ALLOWED = {*sys.stdlib_module_names, "triforce_core", "grpc", "google", "typing_extensions"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"{name} is not part of a plain install", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run_plain(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PLAIN_INSTALL + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY, check=False)


def test_the_sdk_imports_with_grpcio_and_protobuf_alone() -> None:
    result = run_plain("""
import triforce_core
from triforce_core._gen.triforce.v1 import generation_pb2_grpc, tiers_pb2_grpc
from triforce_core.client import TriForceClient
TriForceClient("127.0.0.1:1").close()
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "ray", "pydantic"}))
""")
    assert (result.stdout, result.returncode) == ("[]\n", 0), result.stderr


@pytest.mark.parametrize("module", ["torch", "numpy", "pydantic"])
def test_the_plain_install_above_is_really_plain(module: str) -> None:
    result = run_plain(f"import {module}")
    assert f"{module} is not part of a plain install" in result.stderr


def project() -> dict[str, object]:
    table: dict[str, object] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return table


def declared(extra: str) -> list[Requirement]:
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    return [Requirement(line) for line in extras[extra]]


def locked() -> dict[str, Version]:
    lines = (REPOSITORY / "requirements.lock").read_text().splitlines()
    pins = [re.fullmatch(r"([\w.\-]+)==(\S+)", line) for line in lines if line and not line.startswith("#")]
    assert all(pins), "a line of requirements.lock is not an exact version"
    return {canonicalize_name(pin[1]): Version(pin[2]) for pin in pins if pin}


@pytest.mark.parametrize("extra", ["server", "dev", "docs"])
def test_the_lock_file_satisfies_what_is_declared(extra: str) -> None:
    pins = locked()
    for requirement in declared(extra):
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in requirements.lock"
        assert requirement.specifier.contains(version), f"{requirement} excludes the locked {version}"


def test_torch_is_locked_without_a_build_tag() -> None:
    """`torch==2.13.0` takes whatever build the machine's package index offers; `+cpu` would bind it to one."""
    assert locked()["torch"].local is None


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0"])
def test_the_engine_s_two_torch_versions_are_admitted(version: str) -> None:
    (torch,) = (each for each in declared("server") if each.name == "torch")
    assert torch.specifier.contains(version)


def test_the_wheel_carries_data_and_type_marker(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: setuptools leaves its build folder beside what it builds
    for folder in ("triforce_core", "actors", "deploy", "tests", "scripts"):
        shutil.copytree(REPOSITORY / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet", str(source)]
    subprocess.run([*command, f"--wheel-dir={tmp_path}"], check=True, timeout=120)
    (wheel,) = tmp_path.glob("triforce_serve-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"{package}/py.typed" for package in ("triforce_core", "actors", "deploy")} <= names
    assert {"triforce_core/_gen/triforce/v1/tiers_pb2.pyi", "actors/wire.py"} <= names
    data = {".json", ".md", ".safetensors", ".yaml"}
    demo = {
        str(path.relative_to(REPOSITORY))
        for folder in ("demo", "demo_training")
        for path in (REPOSITORY / "triforce_core" / folder).rglob("*")
        if path.suffix in data
    }
    assert {Path(name).suffix for name in demo} == data
    assert demo <= names
    assert not [name for name in names if name.startswith(("tests/", "scripts/"))]
