"""Clients of others against the real server: openai-python, openai-node, LangChain, lm_eval and schemathesis, unchanged
and as their users install them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chat_models import tokenizer
from tests.packages import REPOSITORY, empty_environment
from tests.random_models import random_model, with_noise
from tests.serve.conftest import Server, free_ports, start
from tests.starting import tried_twice
from triforce_core.client import TriForceClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CLIENTS = REPOSITORY / "tests" / "clients"
CASES, TOOLS = CLIENTS / "cases.json", CLIENTS / "tools.json"
OLDEST, NODE = "openai==1.60.0", "openai@6.49.0"
PLAIN = {"speculation": {"lookaheads": [0, 0]}}


def output_of(*command: str | Path, cwd: Path = REPOSITORY, timeout_s: float = 300) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return empty_environment(tmp_path_factory.mktemp("oldest"), OLDEST, locked=False)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return empty_environment(tmp_path_factory.mktemp("others"), "--requirement", str(CLIENTS / "requirements.txt"))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with openai-node and our script."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("openai-node is installed by npm, which is not here")
    folder = tmp_path_factory.mktemp("node")
    output_of(npm, "install", "--silent", "--ignore-scripts", "--prefix", folder, NODE)
    shutil.copy(CLIENTS / "ask_openai.mjs", folder)
    return folder


def ask_python(python: Path | str, server: Server, cases: Path = CASES, **extra: Any) -> dict[str, Any]:
    script = CLIENTS / "ask_openai.py"
    found = output_of(str(python), script, f"{server.url}/v1", model_of(server), cases, json.dumps(extra))
    answers: dict[str, Any] = json.loads(found)
    return answers


def ask_node(node: Path, server: Server, cases: Path = CASES) -> dict[str, Any]:
    found = output_of("node", "ask_openai.mjs", f"{server.url}/v1", model_of(server), cases, cwd=node)
    answers: dict[str, Any] = json.loads(found)
    return answers


def model_of(server: Server) -> str:
    return str(server.status()["target"]["model"])


def said(choice: dict[str, Any]) -> dict[str, Any]:
    """What a choice says, without the ids of calls, which are drawn anew each time, and without our own extras."""
    message = choice.get("message", {})
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    scores = {name: found for name, found in (choice.get("logprobs") or {}).items() if found}
    text = choice.get("text", message.get("content"))
    return {"text": text, "calls": calls, "logprobs": scores, "finish_reason": choice["finish_reason"]}


def whole_of(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What the choices of a stream say, by index."""
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        empty: dict[str, Any] = {"text": None, "calls": [], "logprobs": {}, "finish_reason": None}
        whole, delta = found.setdefault(choice["index"], empty), choice.get("delta", {})
        text = choice.get("text", delta.get("content"))
        if text is not None:
            whole["text"] = (whole["text"] or "") + text
        for call in delta.get("tool_calls") or []:
            if call["index"] == len(whole["calls"]):
                whole["calls"].append((call["function"]["name"], ""))
            name, arguments = whole["calls"][call["index"]]
            whole["calls"][call["index"]] = (name, arguments + (call["function"].get("arguments") or ""))
        for name, values in (choice.get("logprobs") or {}).items():
            if values:
                whole["logprobs"].setdefault(name, []).extend(values)
        whole["finish_reason"] = choice["finish_reason"] or whole["finish_reason"]
    return found


def near(one: Any, other: Any) -> bool:
    """Whether both are equal. Logprobs differ by their rounding, which depends on what shares a pass."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(near(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(near, one, other))
    return bool(one == pytest.approx(other, abs=1e-3) if isinstance(one, float) else one == other)


def check(answers: dict[str, Any]) -> dict[str, Any]:
    """Return what the answers say. A stream must say the same as the whole answer."""
    found = {}
    for name, answer in answers.items():
        whole = [said(choice) for choice in answer["whole"]["choices"]]
        streamed = whole_of(answer["chunks"])
        for index, choice in enumerate(whole):
            if choice["calls"]:  # an answer of calls has no content; its stream may have none or an empty one
                choice["text"] = streamed[index]["text"] = choice["text"] or None
            assert near(streamed[index], choice), name
        tokens = ("prompt_tokens", "completion_tokens", "total_tokens")  # not where their KV came from
        usage, last = (
            {token: usage[token] for token in tokens}
            for usage in (answer["whole"]["usage"], answer["chunks"][-1]["usage"])
        )
        assert last == usage, name
        found[name] = {"choices": whole, "usage": usage}
    return found


def test_every_field_through_openai_s_clients(
    server: Server, client: TriForceClient, oldest: Path, node: Path, tmp_path: Path
) -> None:
    """Answers are the same from the locked openai-python, the oldest that is supported, and openai-node; streamed and
    whole; with and without speculation. The SDK and the command line give the same, too.
    """
    answers = check(ask_python(sys.executable, server))
    assert near(check(ask_python(sys.executable, server, **PLAIN)), answers)
    assert near(check(ask_python(oldest, server)), answers)
    assert near(check(ask_node(node, server)), answers)
    cases = json.loads(CASES.read_text())
    assert [*answers] == [*cases]
    texts = {name: [choice["text"] for choice in answer["choices"]] for name, answer in answers.items()}
    for name in ("greedy", "sampled", "stopped", "guided"):
        asked = dict(cases[name]["body"]) | {"choice": cases[name].get("extra", {}).get("guided_choice")}
        asked.pop("user", None)
        asked["logit_bias"] = {int(token): bias for token, bias in asked.pop("logit_bias", {}).items()}
        assert [client.generate(**asked).text] == texts[name], name
        prompt = tmp_path / name
        prompt.write_text(asked["prompt"])
        more = ["--dtype", "float32", "--seed", str(asked.get("seed", 0)), "--max-tokens", str(asked["max_tokens"])]
        for field in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
            more += [f"--{field.replace('_', '-')}={asked[field]}"] if field in asked else []
        more += [f"--logit-bias={token}={bias}" for token, bias in asked["logit_bias"].items()]
        more += [f"--stop={text}" for text in asked.get("stop", [])]
        more += [f"--choice={choice}" for choice in asked["choice"] or []]
        done = output_of(sys.executable, "-m", "deploy.cli", "generate", "--json", "--prompt-file", prompt, *more)
        assert [json.loads(done)["text"]] == texts[name], name
    chat = client.chat(cases["chat"]["body"]["messages"], max_tokens=24, temperature=0.7, seed=5)
    assert [chat.text] == texts["chat"]


@pytest.fixture(scope="module")
def tools_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model whose template has tools. Its weights are random, but no call that is forced depends on
    weights.
    """
    folder = tmp_path_factory.mktemp("tools")
    words = tokenizer("qwen")
    target = random_model("qwen3", vocab_size=len(words), eos_token_id=words.eos_token_id)
    for name, model in (("target", target), ("drafter", with_noise(target, 0.1))):
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    config, log = folder / "config.yaml", folder / "log.txt"
    port, grpc_port = free_ports(2)
    config.write_text(
        f"dtype: float32\nmax_sequences: 4\nserver: {{port: {port}, grpc_port: {grpc_port}}}\n"
        f"target: {{model: {folder / 'target'}, served_name: tools}}\ndraft: {{model: {folder / 'drafter'}}}\n"
    )
    running = Server(port, grpc_port, tried_twice(lambda: start(config, log)))
    yield running
    running.process.terminate()
    running.process.wait(60)


def test_calls_through_openai_s_clients(tools_server: Server, oldest: Path, node: Path) -> None:
    answers = check(ask_python(sys.executable, tools_server, TOOLS))
    for name in ("required", "named"):
        [choice] = answers[name]["choices"]
        assert choice["finish_reason"] == "tool_calls"
        for function, arguments in choice["calls"]:
            assert function == "weather"
            assert json.loads(arguments)["city"] in ("Paris", "Rome")
        assert choice["calls"]
    assert near(check(ask_python(sys.executable, tools_server, TOOLS, **PLAIN)), answers)
    assert near(check(ask_python(oldest, tools_server, TOOLS)), answers)
    assert near(check(ask_node(node, tools_server, TOOLS)), answers)


def test_langchain_s_chats(server: Server, client: TriForceClient, others: Path) -> None:
    found = json.loads(output_of(others, CLIENTS / "ask_langchain.py", f"{server.url}/v1", "demo"))
    messages = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "import os"}]
    expected = client.chat(messages, max_tokens=24, temperature=0.7, seed=5)
    assert found["invoked"] == found["streamed"] == expected.text
    assert found["batched"] == [expected.text] * 2
    assert found["usage"]["output_tokens"] == 24
    assert isinstance(found["object"]["x"], int)


def test_lm_eval_s_multiple_choice(server: Server, others: Path, tmp_path: Path) -> None:
    weights = REPOSITORY / "demo_weights" / "triforce_serve_demo" / "target"
    arguments = f"model=demo,base_url={server.url}/v1/completions,tokenizer_backend=huggingface,tokenizer={weights}"
    command = [others, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments, "--log_samples"]
    tasks = ["--tasks", "triforce_tiny", "--include_path", CLIENTS / "lm_eval_task", "--output_path", tmp_path]
    output_of(*map(str, [*command, *tasks]))
    [results] = tmp_path.rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["triforce_tiny"]["acc,none"] == 1.0
    [samples] = tmp_path.rglob("samples_*.jsonl")
    scores = [json.loads(line)["filtered_resps"] for line in samples.read_text().splitlines()]
    assert len(scores) == 4
    assert all(float(score) < 0 for each in scores for score, _ in each)


def test_what_the_openapi_document_promises_is_kept(server: Server, others: Path, tmp_path: Path) -> None:
    """1,000 cases and more; a 504 is possible because a case may set `timeout_s`."""
    document = f"{server.url}/openapi.json"
    checks = "status_code_conformance,content_type_conformance,response_schema_conformance"
    report = tmp_path / "report.ndjson"
    options = ["--checks", checks, "--phases", "examples,coverage,fuzzing", "--max-examples", "150", "--seed", "1"]
    options += ["--request-timeout", "60", "--report", "ndjson", "--report-ndjson-path", str(report)]
    schemathesis = str(others.with_name("schemathesis"))
    done = subprocess.run(
        [schemathesis, "run", document, *options, "--continue-on-failure"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    statuses = Counter(int(found) for found in re.findall(r'"status_code": ?(\d+)', report.read_text()))
    print(statuses)
    assert statuses.total() >= 1000
    assert {status for status in statuses if status >= 500} <= {504}
