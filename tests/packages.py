"""The three distributions as `make dist` builds them, for tests of what they hold and of what users install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.install import output_of, prepare_uv

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("triforce_core", "actors", "deploy", "demo_weights", "tools", "tests", "scripts", "docs")
FILES = ("pyproject.toml", "MANIFEST.in", "Makefile", "requirements.lock", "README.md", "LICENSE", "CHANGELOG.md")


@dataclass(frozen=True)
class Built:
    """What `make dist` made."""

    folder: Path

    def only(self, pattern: str) -> Path:
        (found,) = self.folder.glob(pattern)
        return found

    @property
    def wheel(self) -> Path:
        return self.only("triforce_serve-*.whl")

    @property
    def demo_wheel(self) -> Path:
        return self.only("triforce_serve_demo-*.whl")

    @property
    def tools_wheel(self) -> Path:
        return self.only("triforce_serve_tools-*.whl")

    @property
    def sdist(self) -> Path:
        return self.only("triforce_serve-*.tar.gz")


def make_dist(folder: Path) -> Built:
    """`make dist`, in a copy of the repository in `folder` and with the Python that runs the tests."""
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    for name in FILES:
        shutil.copy(REPOSITORY / name, folder)
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "dist", f"BIN={Path(sys.executable).parent}", "--assume-old=.venv/.installed"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Built(folder / "dist")


def empty_environment(folder: Path, *packages: str, locked: bool = True) -> Path:
    """The Python of a new environment in `folder` that holds these packages and what they require, in the versions of
    requirements.lock if `locked`. uv takes them from where this project's own environment was installed from, or from
    its cache.
    """
    uv, variables = prepare_uv()
    python = folder / "environment" / "bin" / "python"
    constraint = ["--constraint", str(REPOSITORY / "requirements.lock")] if locked else []
    given = ["--compile-bytecode", *constraint, *packages]
    output_of([uv, "venv", "--quiet", "--python", sys.executable, str(python.parents[1])], variables)
    output_of([uv, "pip", "install", "--quiet", "--python", str(python), *given], variables)
    return python
