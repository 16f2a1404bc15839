"""Every code block of the quickstart, the operations page and the README is run, or checked as far as this machine can.

A block that is new or changed must be entered below: none is passed over.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import psutil
import pytest
import requests
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.charts import KUBERNETES, helm
from tests.serve.conftest import Server
from triforce_core.config import load_settings

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = ("docs/quickstart.md", "docs/sdk.md", "docs/operations.md", "README.md")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)


class Block(NamedTuple):
    """A code block of a page; a line that includes a file stands for the file's text."""

    page: str
    language: str
    first_line: str
    text: str


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        for language, text in FENCED.findall((REPOSITORY / page).read_text()):
            whole = SNIPPET.sub(lambda match: (REPOSITORY / match[1]).read_text().rstrip("\n"), text)
            found.append(Block(page, language, text.partition("\n")[0], whole))
    return found


# -- what is done with a block -----------------------------------------------------------------------------------------


Handler = Callable[[Block, Server, Path], None]


def runs(expected: str) -> Handler:
    """It is run against the tests' server, and prints what matches `expected`."""

    def handle(block: Block, server: Server, folder: Path) -> None:
        here = block.text.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        here = here.replace("127.0.0.1:9000", server.grpc_address).replace("/tmp/", f"{folder}/")
        here = here.replace(".venv/bin/", f"{Path(sys.executable).parent}/")
        shell = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
        command = [*shell, here]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        assert re.search(expected, done.stdout, re.DOTALL), done.stdout

    return handle


def is_what_the_tests_serve(block: Block, server: Server, folder: Path) -> None:
    """`make serve` installs, and then runs what the tests' server runs; `make chat` does so with another model. `make
    test` runs the tests. The slow test below runs `make serve` itself.
    """
    recipes = (REPOSITORY / "Makefile").read_text()
    assert {line.split()[1] for line in block.text.splitlines()} <= {"serve", "chat", "test"}
    assert re.search(r"^serve: \$\(INSTALLED\)\n\t\$\(BIN\)/triforce serve$", recipes, re.MULTILINE)
    assert re.search(r"^chat: \$\(INSTALLED\)\n.+\n\t\$\(BIN\)/triforce serve --model smollm2$", recipes, re.MULTILINE)
    assert server.process.args[2:4] == ["deploy.cli", "serve"]  # type: ignore[index]


def needs_a_gpu(block: Block, server: Server, folder: Path) -> None:
    """The block is not run, because this machine has no GPU. The settings files that it names are checked."""
    files = [word for word in block.text.split() if word.endswith(".yaml")]
    assert files
    for file in files:
        assert load_settings(REPOSITORY / file).device == "cuda"


def needs_a_cluster(block: Block, server: Server, folder: Path) -> None:
    """No cluster is here, and no Docker: what Helm would send is rendered, and the image's words are checked."""
    *_, built, _, installed = (line.replace("$REGISTRY", "registry.example.com") for line in block.text.splitlines())
    assert "ARG VARIANT" in (REPOSITORY / "deploy" / "Dockerfile").read_text()
    assert "--build-arg VARIANT=cpu --file deploy/Dockerfile" in built
    given = installed.removeprefix("helm install ").replace("k8s/", f"{REPOSITORY}/k8s/").split()
    done = helm("template", *given, "--kube-version", KUBERNETES)
    assert done.returncode == 0, done.stderr
    image = built.split("--tag ")[1].split()[0]
    assert f'image: "{image}"' in done.stdout


def is_valid(block: Block, server: Server, folder: Path) -> None:
    """These are settings; `triforce config --config` reads them."""
    file = folder / "triforce.yaml"
    file.write_text(block.text)
    command = [sys.executable, "-m", "deploy.cli", "config", "--config", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["target"]["model"].startswith("/models/")


def as_grpcurl(expected: str) -> Handler:
    """grpcurl is not to be had here: its request is sent from here, with what the server's reflection tells."""

    def handle(block: Block, server: Server, folder: Path) -> None:
        command = shlex.split(block.text.replace("\\\n", ""))
        assert command[:2] == ["grpcurl", "-plaintext"]
        body = command[command.index("-d") + 1] if "-d" in command else "{}"
        assert "127.0.0.1:9000" in command
        with grpc.insecure_channel(server.grpc_address) as channel:
            reflection = ProtoReflectionDescriptorDatabase(channel)
            if command[-1] == "list":
                answers = [*reflection.get_services()]
            else:
                service, _, name = command[-1].partition("/")
                method = DescriptorPool(reflection).FindServiceByName(service).methods_by_name[name]
                request = json_format.Parse(body, GetMessageClass(method.input_type)())
                call = channel.unary_stream(f"/{command[-1]}")(request.SerializeToString(), timeout=60)
                answers = [str(GetMessageClass(method.output_type).FromString(answer)) for answer in call]
        assert re.search(expected, "\n".join(answers), re.DOTALL), answers

    return handle


def constructs(block: Block, server: Server, folder: Path) -> None:
    """The client can be made, though there is no server at this address."""
    done = subprocess.run([sys.executable, "-c", block.text], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def asks_for_extras(block: Block, server: Server, tmp_path: Path) -> None:
    """The packages are not published yet; `tests/unit/deploy/test_tracing.py` has what the variable does."""
    [asked] = re.findall(r"triforce-serve\[([\w,]+)\]", block.text)
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*asked.split(",")} <= {*extras}


HANDLED: dict[tuple[str, str], Handler] = {
    ("docs/quickstart.md", "make serve"): is_what_the_tests_serve,
    ("docs/quickstart.md", "make chat"): is_what_the_tests_serve,
    ("docs/quickstart.md", '--8<-- "docs/examples/first_chat.sh"'): runs(r'"role":"assistant".+"completion_tokens":64'),
    ("docs/quickstart.md", '--8<-- "docs/examples/first_request.sh"'): runs(r'"text":".+"completion_tokens":64'),
    ("docs/quickstart.md", '--8<-- "docs/examples/openai_client.py"'): runs(r".+CompletionUsage\(completion_tokens=64"),
    ("docs/quickstart.md", '--8<-- "docs/examples/sdk_client.py"'): runs(r".+\n\{.*"),
    ("docs/quickstart.md", '--8<-- "docs/examples/command_line.sh"'): runs(r"ms a token"),
    ("docs/quickstart.md", '--8<-- "docs/examples/one_gpu.yaml"'): is_valid,
    ("docs/quickstart.md", ".venv/bin/triforce config --config docs/examples/one_gpu.yaml"): runs(r"budget: 4096"),
    ("docs/quickstart.md", ".venv/bin/triforce serve --config docs/examples/one_gpu.yaml"): needs_a_gpu,
    ("docs/quickstart.md", '--8<-- "docs/examples/two_4090.yaml"'): is_valid,
    ("docs/quickstart.md", ".venv/bin/triforce serve --config docs/examples/two_4090.yaml"): needs_a_gpu,
    (
        "docs/quickstart.md",
        "helm install kuberay-operator kuberay-operator --repo https://ray-project.github.io/kuberay-helm/",
    ): needs_a_cluster,
    ("docs/sdk.md", '--8<-- "docs/examples/sdk_chat.py"'): runs(r".+\n\d+ tokens\n.+"),
    ("docs/sdk.md", '--8<-- "docs/examples/sdk_async.py"'): runs(r"^('.+'\n){3}$"),
    ("docs/sdk.md", '--8<-- "docs/examples/sdk_errors.py"'): runs(r"^healthy\ntemperature: -1.0 must be between"),
    ("docs/sdk.md", '--8<-- "docs/examples/chat.sh"'): runs(r"\w+"),
    ("docs/sdk.md", "from triforce_core.client import TriForceClient"): constructs,
    ("docs/sdk.md", "grpcurl -plaintext 127.0.0.1:9000 list"): as_grpcurl(r"grpc\.health.+triforce\.v1\.Generation"),
    (
        "docs/sdk.md",
        """grpcurl -plaintext -d '{"text": "def fibonacci(n):", "max_tokens": 64, "seed": 1}' \\""",
    ): as_grpcurl(r"text: .+completion_tokens: 64"),
    ("docs/operations.md", "curl http://127.0.0.1:8000/health"): runs(r'^\{"status":"ok"\}.*"places":\d+'),
    ("docs/operations.md", "pip install 'triforce-serve[server,tracing]'"): asks_for_extras,
    ("README.md", "make serve   # sets up .venv, starts three tier actors and the endpoint on 127.0.0.1:8000"): (
        is_what_the_tests_serve
    ),
    ("README.md", "python3 - <<'EOF' > /tmp/request.json"): runs(r"data: .*data: \[DONE\]"),
    ("README.md", "target: {model: /models/Llama-2-7B-128K, context_length: 65536}"): is_valid,
}


def test_every_block_is_handled() -> None:
    found = [(block.page, block.first_line) for block in blocks()]
    assert sorted(found) == sorted(HANDLED), "each block once, and no entry without its block"


@pytest.mark.parametrize("block", blocks(), ids=lambda block: f"{Path(block.page).stem}: {block.first_line[:60]}")
def test_a_block(server: Server, tmp_path: Path, block: Block) -> None:
    HANDLED[block.page, block.first_line](block, server, tmp_path)


# -- the answers that docs/reference/http.md shows ---------------------------------------------------------------------


def fields(value: Any, path: str = "") -> set[str]:
    """The dotted names of all fields, without the keys of mappings by plan."""
    if isinstance(value, list):
        return set().union(*(fields(each, path) for each in value))
    if isinstance(value, dict) and path.rpartition(".")[2] not in ("rounds", "corrections"):
        return set().union({path}, *(fields(each, f"{path}.{name}") for name, each in value.items()))
    return {path}


def example(name: str) -> Any:
    return json.loads((REPOSITORY / "docs" / "examples" / name).read_text())


def test_the_answers_shown_are_those_that_come(server: Server) -> None:
    answer = server.complete("def fibonacci(n):", max_tokens=64, temperature=0, seed=1).json()
    assert fields(answer) == fields(example("completion.json"))
    known_late = {".tiers.least_stall_ms"}  # once enough passes have shown it
    assert fields(server.status()) | known_late == fields(example("status.json")) | known_late


# -- from clone to answer ----------------------------------------------------------------------------------------------

CLONE_TO_ANSWER_S = 100.0


def free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@contextmanager
def make_serve(clone: Path, log: Path) -> Iterator[None]:
    """`make serve` as a user types it, until it is ready; on leaving it is ended by Ctrl-C."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    with log.open("w") as output:
        process = subprocess.Popen(
            ["make", "serve"], cwd=clone, stdout=output, stderr=output, env=variables, start_new_session=True
        )
    started: list[psutil.Process] = []
    try:
        until = time.monotonic() + 400
        while "ready after" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        started = psutil.Process(process.pid).children(recursive=True)
        yield
    finally:
        os.killpg(process.pid, signal.SIGINT)
        _, left = psutil.wait_procs(started, timeout=30)
        for each in left:
            each.kill()
        process.kill()
        process.wait(10)
    assert not left, f"left behind: {left}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_from_clone_to_the_first_answer(tmp_path: Path) -> None:
    """The cache of packages is warm, as on a machine that has installed them before."""
    if not (free(8000) and free(9000)):
        pytest.skip("ports 8000 and 9000, which `make serve` uses, are taken")
    busy = os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    began = time.monotonic()
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True, timeout=60)
    with make_serve(clone, tmp_path / "log.txt"):
        script = (clone / "docs/examples/first_request.sh").read_text()
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
        took = time.monotonic() - began
        assert json.loads(done.stdout)["usage"]["completion_tokens"] == 64
        assert requests.get("http://127.0.0.1:8000/health", timeout=10).status_code == 200
    print(f"\nfrom clone to the first answer: {took:.0f} s")
    if busy:
        warnings.warn(f"{took:.0f} s are not judged: others are using the machine's cores", stacklevel=1)
    else:
        assert took <= CLONE_TO_ANSWER_S
