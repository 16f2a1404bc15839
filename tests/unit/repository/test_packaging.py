"""What a plain install may import, what the lock file holds, and what `make dist` builds."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.packages import REPOSITORY, Built, empty_environment, make_dist
from triforce_core import __version__

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


def test_the_sdk_loads_no_engine_where_there_is_one() -> None:
    """Loading an engine would take seconds. In a plain install the test would miss an import that is tried and given
    up.
    """
    code = "import sys, triforce_core.client; print({'torch', 'transformers', 'ray', 'numpy'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout, result.returncode) == ("set()\n", 0), result.stderr


def test_a_gateway_loads_neither_a_compiler_nor_models() -> None:
    """At each start of a process, importing these would take twice as long as all other imports."""
    heavy = "{'torch._dynamo', 'transformers.modeling_utils'}"
    code = f"import sys, deploy.gateway; print({heavy} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout, result.returncode) == ("set()\n", 0), result.stderr


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


def needed_by_tools() -> list[Requirement]:
    tools = tomllib.loads((REPOSITORY / "tools/pyproject.toml").read_text())["project"]
    return [Requirement(line) for line in tools["dependencies"] if not line.startswith("triforce-serve")]


def locked() -> dict[str, Version]:
    lines = (REPOSITORY / "requirements.lock").read_text().splitlines()
    pins = [re.fullmatch(r"([\w.\-]+)==(\S+)", line) for line in lines if line and not line.startswith("#")]
    assert all(pins), "a line of requirements.lock is not an exact version"
    return {canonicalize_name(pin[1]): Version(pin[2]) for pin in pins if pin}


@pytest.mark.parametrize("extra", ["server", "tracing", "dev", "docs", "tools"])
def test_the_lock_file_satisfies_what_is_declared(extra: str) -> None:
    pins = locked()
    ours = {"triforce-serve-demo"}  # scripts/install.py installs it from its folder
    assert not ours & pins.keys()
    needed = needed_by_tools() if extra == "tools" else declared(extra)
    for requirement in (each for each in needed if each.name not in ours):
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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """`make dist` ends with `twine check --strict`, so this fixture fails where a distribution's metadata does."""
    return make_dist(tmp_path_factory.mktemp("source"))


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_carries_data_and_type_markers_and_no_weights(built: Built) -> None:
    names = names_in(built.wheel)
    assert {f"{package}/py.typed" for package in ("triforce_core", "actors", "deploy")} <= names
    assert {"triforce_core/_gen/triforce/v1/tiers_pb2.pyi", "actors/wire.py"} <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "triforce_core",
        "actors",
        "deploy",
        "triforce_serve",  # its metadata
    }
    assert built.wheel.stat().st_size < 1_000_000


def test_the_demo_pair_s_wheel_carries_all_of_its_data_and_no_code(built: Built) -> None:
    folder = REPOSITORY / "demo_weights"
    there = {str(path.relative_to(folder)) for path in (folder / "triforce_serve_demo").rglob("*") if path.is_file()}
    packed = {name for name in names_in(built.demo_wheel) if ".dist-info/" not in name}
    assert packed == {name for name in there if "__pycache__" not in name}
    assert {Path(name).suffix for name in packed} == {".json", ".md", ".safetensors", ".py"}
    assert [name for name in packed if name.endswith(".py")] == ["triforce_serve_demo/__init__.py"]


def test_the_tools_wheel_carries_tools_alone(built: Built) -> None:
    names = names_in(built.tools_wheel)
    assert {
        "triforce_tools/py.typed",
        "triforce_tools/demo_training/train.yaml",
        "triforce_tools/cli/bench.py",
    } <= names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"triforce_tools", "triforce_serve_tools"}


@pytest.mark.parametrize("wheel", ["wheel", "demo_wheel", "tools_wheel"])
def test_the_licence_is_in_every_wheel(built: Built, wheel: str) -> None:
    """There are copies, because setuptools takes no file from outside a project's folder."""
    packed = zipfile.ZipFile(getattr(built, wheel))
    (name,) = (name for name in packed.namelist() if name.endswith("/licenses/LICENSE"))
    assert packed.read(name) == (REPOSITORY / "LICENSE").read_bytes()


def test_the_sdist_is_what_a_wheel_is_built_from(built: Built) -> None:
    """Every wheel of `make dist` is built from its sdist. Tests and weights are not in it."""
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= names
    ours = ("triforce_core", "actors", "deploy", "triforce_serve.egg-info")
    assert {name.partition("/")[0] for name in names if "/" in name} == set(ours)
    assert built.sdist.stat().st_size < 1_000_000


def test_all_distributions_have_one_version(built: Built) -> None:
    for folder, extra in (("demo_weights", "server"), ("tools", "tools")):
        other = tomllib.loads((REPOSITORY / folder / "pyproject.toml").read_text())["project"]
        (needed,) = (each for each in declared(extra) if each.name == other["name"])
        assert (other["version"], str(needed.specifier)) == (__version__, f"=={__version__}")
    assert f"triforce-serve[server]=={__version__}" in other["dependencies"]
    found = [path.name.split("-")[1].removesuffix(".tar.gz") for path in built.folder.iterdir()]
    assert found == [__version__] * 6


def test_the_changelog_has_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (REPOSITORY / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == ("Unreleased", "")
    version, date = headings[1]
    assert (version, bool(date)) == (__version__, True)


@pytest.mark.slow
def test_the_client_alone_is_imported_at_once(built: Built, tmp_path: Path) -> None:
    """The wheel is installed into an empty environment. There is no torch, and the import takes no more than .3 s, with
    the start of Python.
    """
    python = empty_environment(tmp_path, str(built.wheel))
    installed = subprocess.run(
        [python, "-c", "from importlib.metadata import distributions as d; print(*(each.name for each in d()))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    names = {canonicalize_name(name) for name in installed.stdout.split()}
    assert names == {"triforce-serve", "grpcio", "protobuf", "typing-extensions"}
    check = "from triforce_core import client; import sys; assert client.__file__.startswith(sys.prefix)"
    took: list[float] = []
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([python, "-c", check], check=True, cwd=tmp_path)
        took.append(time.perf_counter() - began)
    print(f"wheel {built.wheel.stat().st_size:,} bytes; import {', '.join(f'{each:.3f}' for each in took)} s")
    assert statistics.median(took) < 0.3, took
