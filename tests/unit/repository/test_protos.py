"""triforce_core/_gen is what protos/ generates, and the runtimes that pyproject.toml admits can load it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from scripts.generate_protos import GENERATED, REPOSITORY, generate


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    generate(tmp_path / "gen")
    fresh, kept = contents(tmp_path / "gen"), contents(GENERATED)
    stale = sorted(name for name in fresh.keys() | kept.keys() if fresh.get(name) != kept.get(name))
    assert not stale, f"stale in {GENERATED}: run `make protos`"


def test_the_client_s_dependencies_admit_only_runtimes_that_load_the_generated_code() -> None:
    """Generated modules raise at import under a runtime older than the generator that wrote them."""
    code = b"".join(contents(GENERATED).values()).decode()
    grpc_version = max(map(Version, re.findall(r"GRPC_GENERATED_VERSION = '(.+)'", code)))
    protobuf_version = max(map(Version, re.findall(r"# Protobuf Python Version: (.+)", code)))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    admitted = {(each := Requirement(line)).name: each.specifier for line in project["dependencies"]}
    assert admitted.keys() == {"grpcio", "protobuf"}
    assert lowest(str(admitted["grpcio"])) >= grpc_version
    assert lowest(str(admitted["protobuf"])) >= protobuf_version
    # protobuf loads code of its own major version and of the one before.
    assert not admitted["protobuf"].contains(f"{protobuf_version.major + 2}.0")


def lowest(specifier: str) -> Version:
    return max(Version(bound.removeprefix(">=")) for bound in specifier.split(",") if bound.startswith(">="))
