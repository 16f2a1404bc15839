"""The image without an engine: its steps run over this machine's files, and so does its command. Needs root and Linux.

An overlay takes what the steps write, and a namespace hides it from everything else. In place of Debian's and Python's
image there is this machine; steps that install Debian's packages are left out.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.utils import canonicalize_name

from scripts.install import PIP, output_of, pip_settings, uv_settings
from tests.dockerfile import REPOSITORY, Image, Step, context

# As in an image: what a container runtime mounts, and nothing of whoever built it.
MOUNTS = """
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o size=2g tmpfs "$root/dev/shm"
mount -t tmpfs -o noexec,nosuid,nodev,mode=1777 tmpfs "$root/tmp"
"""
NO_PRIVILEGES = ["--clear-groups", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
NO_SETTINGS = Path("/dev/null")
FROM_OUTSIDE = ("PIP_", "UV_", "SSL_CERT_", "http_proxy", "https_proxy", "no_proxy")  # where packages come from


def can_run() -> bool:
    """Whether namespaces and overlays can be made on this machine."""
    tried = "mount -t tmpfs tmpfs /mnt && mkdir /mnt/{a,b,c} && mount -t overlay -o "
    tried += "lowerdir=/,upperdir=/mnt/a,workdir=/mnt/b overlay /mnt/c"
    command = ["unshare", "--mount", "--pid", "--fork", "bash", "-ec", tried]
    return (
        shutil.which("unshare") is not None and not subprocess.run(command, capture_output=True, check=False).returncode
    )


@dataclass(frozen=True)
class Built:
    """What the steps of an image have written. `folder` is on a file system that can be the upper one of an overlay."""

    folder: Path
    image: Image

    def build(self, stages: list[Image]) -> None:
        """Run the steps of these stages, the last of which is the image."""
        for name in ("written", "work", "root", "sent"):
            (self.folder / name).mkdir()
        for path in context():
            (self.folder / "sent" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / path, self.folder / "sent" / path)
        bare = "/opt/bare"  # an environment without packages, in place of the Python of the image
        # This machine's Python may be in root's home, which no other user can enter. An image's Python never is.
        python = shlex.quote(str(Path(sys.executable).resolve()))
        lines = [f"chmod o+x /root && {python} -m venv {bare}"]
        for stage in stages:
            workdir, env = "/", dict(stage.env, PATH=f"{bare}/bin:{stage.env['PATH']}")
            env.pop("UV_TORCH_BACKEND", None)  # its index is not asked; this machine's settings name others
            for step in stage.steps:
                if step.name == "WORKDIR":
                    workdir = step.text
                    lines.append(f"mkdir -p {workdir}")
                elif step.name == "COPY" and "from" not in step.options:
                    lines.append(copying(step, workdir))
                elif step.name == "RUN" and "apt-get" not in step.text:
                    settings = shlex.join(f"{name}={value}" for name, value in {**package_settings(), **env}.items())
                    lines.append(f"cd {workdir} && env -i HOME=/root {settings} sh -ec {shlex.quote(step.rest)}")
        script = f"""
            mount -t overlay -o lowerdir=/,upperdir={self.folder}/written,workdir={self.folder}/work overlay "$root"
            mkdir "$root/sent"
            {MOUNTS}
            mount --bind {self.folder}/sent "$root/sent"
            chroot "$root" bash -ec {shlex.quote(chr(10).join(lines))}
        """
        done = subprocess.run(self.command(script), capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def command(self, script: str, *arguments: str) -> list[str]:
        """The command that runs a script in namespaces of its own. They end with the first process in them. This
        process is killed when `unshare` ends, unless it has changed its user.
        """
        namespaces = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return [*namespaces, "bash", "-euc", f"root={self.folder}/root\n{script}", "bash", *arguments]

    def running(self, arguments: list[str], settings: Path = NO_SETTINGS) -> list[str]:
        """The command that runs `arguments` in the image as a container does. They run as the image's user and without
        privileges. Only /tmp and the home can be written. The file of settings is where the image expects it.
        """
        user, group = self.image.user.split(":")
        home = self.image.env["HOME"]
        script = f"""
            work=$(mktemp -d {self.folder}/work.XXX)  # of its own: containers run side by side
            mount -t overlay -o ro,lowerdir=/,upperdir={self.folder}/written,workdir=$work overlay "$root"
            {MOUNTS}
            mount -t tmpfs -o uid={user},gid={group} tmpfs "$root{home}"
            mount --bind {settings} "$root/etc/triforce/triforce.yaml"
            cd "$root{self.image.workdir}"
            exec chroot "$root" setpriv --reuid={user} --regid={group} {shlex.join(NO_PRIVILEGES)} env -i \\
                --chdir={self.image.workdir} {shlex.join(f"{k}={v}" for k, v in self.image.env.items())} "$@"
        """
        return self.command(script, *arguments)

    def start_command(self) -> list[str]:
        """What the image runs. Its entrypoint, tini, is a package of Debian, and is left out if this machine
        lacks it.
        """
        entrypoint = self.image.entrypoint
        return [*(entrypoint if shutil.which(entrypoint[0]) else []), *self.image.cmd]

    @contextmanager
    def started(self, arguments: list[str], log: Path, settings: Path = NO_SETTINGS) -> Iterator[subprocess.Popen[str]]:
        """Run `arguments` in the image, and write what they print to `log`. Whatever still runs at the end is
        killed.
        """
        with log.open("w") as output:
            process = subprocess.Popen(
                self.running(arguments, settings), stdout=output, stderr=subprocess.STDOUT, text=True
            )
        try:
            yield process
        finally:
            # The first process of the namespace takes all others with it. Killing `unshare` is not enough: a process
            # that changes its user is no longer killed when its parent ends.
            for each in first_processes(process):
                each.kill()
            process.wait(10)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.running([*arguments]), capture_output=True, text=True, timeout=120, check=False)

    def output(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def packages(self) -> dict[str, str]:
        """The versions of the image's Python packages, by canonical name."""
        code = "import json; from importlib.metadata import distributions as d"
        code += "; print(json.dumps({each.name: each.version for each in d()}))"
        found: dict[str, str] = json.loads(self.output("python", "-c", code))
        return {canonicalize_name(name): version for name, version in found.items()}


def first_processes(unshare: subprocess.Popen[str]) -> list[psutil.Process]:
    """The first process in the namespaces that `unshare` has made; none if `unshare` has ended."""
    if unshare.poll() is not None:
        return []
    found: list[psutil.Process] = psutil.Process(unshare.pid).children()
    return found


def copying(step: Step, workdir: str) -> str:
    """The shell commands for a COPY step. If the target ends with a slash, it is the folder that the files go into.
    Otherwise it is the new name of the file, or the folder that gets the content of the source folder.
    """
    *sources, target = step.rest.split()
    at = os.path.join(workdir, target)
    if target.endswith("/"):
        return f"mkdir -p {at} && cd /sent && cp -r {' '.join(sources)} {at}"
    [source] = sources
    if (REPOSITORY / source).is_dir():
        return f"mkdir -p {at} && cp -r /sent/{source}/. {at}"
    return f"mkdir -p {os.path.dirname(at)} && cp /sent/{source} {at}"


def package_settings() -> dict[str, str]:
    """The environment variables that tell pip and uv where to find packages from here."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if name.lower().startswith(tuple(p.lower() for p in FROM_OUTSIDE))
    }
    return ours | uv_settings(pip_settings(output_of([*PIP, "config", "list"], {})))
