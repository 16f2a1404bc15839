"""The workflows of GitHub Actions: well-formed, with no more rights than they need, and true to this repository."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packages import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
RIGHTS = {  # what a job may do beyond reading the repository
    ("release.yml", "pypi"): {"id-token": "write"},
    ("release.yml", "image"): {"contents": "read", "packages": "write"},
    ("release.yml", "chart"): {"packages": "write"},
}


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


def test_they_follow_github_s_schema() -> None:
    command = [Path(sys.executable).with_name("check-jsonschema"), "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, *WORKFLOWS], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_no_job_has_more_rights_than_it_needs(path: Path) -> None:
    by_default = yaml.safe_load(path.read_text())["permissions"]
    for name, job in jobs(path).items():
        assert job.get("permissions", by_default) == RIGHTS.get((path.name, name), {"contents": "read"}), name
        for step in job.get("steps", []):
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"] == {"persist-credentials": False}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_has_a_version(path: Path) -> None:
    used = re.findall(r"uses: (\S+)", path.read_text())
    assert used
    for action in used:
        assert re.fullmatch(r"\./.*\.yml|[\w.-]+/[\w.-]+@(release/)?v\d+", action), action


def test_what_a_release_publishes_is_what_the_checks_have_built() -> None:
    checks, release = (jobs(REPOSITORY / ".github/workflows" / name) for name in ("ci.yml", "release.yml"))

    def artifacts(jobs: dict[str, Any], action: str) -> set[str]:
        steps = (step for job in jobs.values() for step in job.get("steps", []))
        return {
            step["with"]["name"] for step in steps if step.get("uses", "").startswith(f"actions/{action}-artifact@")
        }

    assert artifacts(release, "download") == {"distributions", "chart"} <= artifacts(checks, "upload")
    assert release["image"]["strategy"]["matrix"]["variant"] == ["cpu", "cuda"]
    assert release["build"]["uses"] == "./.github/workflows/ci.yml"
    assert {name for name, job in release.items() if job.get("needs") == "build"} == {"pypi", "image", "chart"}
