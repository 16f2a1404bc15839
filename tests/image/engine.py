"""Images as Docker or buildah builds them, and containers as Docker or podman runs them, whichever is here."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILDERS = {"docker": ("docker", "build"), "podman": ("buildah", "build", "--layers", "--format", "docker")}
MORE_TO_BUILD = "IMAGE_BUILD"  # an environment variable: more of the build's options, such as --build-arg PYPI_INDEX=…


def found() -> str | None:
    """The engine that is here and works."""
    for engine, builder in BUILDERS.items():
        if shutil.which(engine) and shutil.which(builder[0]) and not run(engine, "info").returncode:
            return engine
    return None


def run(*command: Any, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout_s, check=False)


def wait_for(condition: Callable[[], bool], timeout_s: float, told: Callable[[], str]) -> float:
    """The seconds until the condition holds. Errors of connections are taken for `not yet`."""
    began = time.monotonic()
    while True:
        try:
            if condition():
                return time.monotonic() - began
        except OSError:
            pass
        assert time.monotonic() < began + timeout_s, told()
        time.sleep(0.5)


@dataclass(frozen=True)
class Engine:
    name: str

    def __call__(self, *arguments: Any, timeout_s: float = 60.0) -> str:
        done = run(self.name, *arguments, timeout_s=timeout_s)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout.strip()

    def build(self, tag: str, repository: Path, *more: str) -> float:
        """Build the image, and return the seconds that it took."""
        began = time.monotonic()
        given = shlex.split(os.environ.get(MORE_TO_BUILD, ""))
        command = [*BUILDERS[self.name], *given, *more, "--file", repository / "deploy/Dockerfile", "--tag", tag]
        done = run(*command, repository, timeout_s=2400)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return time.monotonic() - began

    def layers(self, tag: str) -> dict[str, int]:
        """The bytes of each of the image's layers, by the layer's name, the lowest first."""
        sizes, manifest = dict[str, int](), ""
        saving = subprocess.Popen([self.name, "save", tag], stdout=subprocess.PIPE)
        with saving, tarfile.open(fileobj=saving.stdout, mode="r|") as saved:
            for member in saved:
                sizes[member.name] = member.size
                if member.name == "manifest.json":
                    manifest = str(saved.extractfile(member).read(), "utf-8")  # type: ignore[union-attr]
        [described] = json.loads(manifest)
        return {layer: sizes[layer] for layer in described["Layers"]}

    def image(self, tag: str) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self("image", "inspect", "--format", "{{json .Config}}", tag))
        return config

    def start(self, name: str, image: str, *options: Any, command: list[str] | None = None) -> Container:
        self("run", "--detach", "--name", name, *options, image, *(command or []))
        return Container(self, name)


@dataclass(frozen=True)
class Container:
    engine: Engine
    name: str

    def inspect(self, format: str) -> Any:
        return json.loads(self.engine("inspect", "--format", format, self.name))

    @property
    def running(self) -> bool:
        return bool(self.inspect("{{json .State.Running}}"))

    @property
    def address(self) -> str:
        [network] = self.inspect("{{json .NetworkSettings.Networks}}").values()
        return str(network["IPAddress"])

    def logs(self) -> str:
        done = run(self.engine.name, "logs", self.name)
        return done.stdout + done.stderr

    def run(self, *command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return run(self.engine.name, "exec", self.name, *command, timeout_s=timeout_s)

    def memory(self) -> int:
        """The bytes that its processes hold for themselves, by the kernel's proportional count."""
        total = "cat /proc/[0-9]*/smaps_rollup 2>/dev/null | awk '/^Pss:/ {kb += $2} END {print kb * 1024}'"
        return int(float(self.run("bash", "-c", total).stdout))

    def kill(self, signal: str = "KILL") -> None:
        self.engine("kill", "--signal", signal, self.name)

    def wait(self, timeout_s: float) -> int:
        """The exit status."""
        return int(self.engine("wait", self.name, timeout_s=timeout_s))

    def remove(self) -> None:
        run(self.engine.name, "rm", "--force", "--volumes", self.name)
