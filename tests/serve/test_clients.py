"""Clients of others against the real server, unchanged and as their users install them: the SDKs of OpenAI and of
Anthropic, LangChain, pydantic-ai, LiteLLM's proxy, guidellm, lm_eval and schemathesis.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from openai import OpenAI

from tests.chat_models import QWEN, tokenizer
from tests.packages import REPOSITORY, empty_environment
from tests.random_models import random_model, with_noise
from tests.serve.conftest import Server, free_ports, start
from tests.starting import tried_twice
from triforce_core.client import TriForceClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CLIENTS = REPOSITORY / "tests" / "clients"
CASES, TOOLS = CLIENTS / "cases.json", CLIENTS / "tools.json"
# The same chats as each API has them, without tools and with them.
CHATS, CALLS = CLIENTS / "same_chats.json", CLIENTS / "same_calls.json"
OLDEST, OLDEST_RESPONSES, OLDEST_ANTHROPIC = "openai==1.60.0", "openai==1.66.2", "anthropic==0.47.0"
NODE = ("openai@6.49.0", "@anthropic-ai/sdk@1.14.0")
PLAIN = {"speculation": {"lookaheads": [0, 0]}}
KEY = "none"


def output_of(*command: str | Path, cwd: Path = REPOSITORY, timeout_s: float = 300) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return empty_environment(tmp_path_factory.mktemp("oldest"), OLDEST, locked=False)


@pytest.fixture(scope="module")
def oldest_responses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return empty_environment(tmp_path_factory.mktemp("oldest_responses"), OLDEST_RESPONSES, locked=False)


@pytest.fixture(scope="module")
def oldest_anthropic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return empty_environment(tmp_path_factory.mktemp("oldest_anthropic"), OLDEST_ANTHROPIC, locked=False)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return empty_environment(tmp_path_factory.mktemp("others"), "--requirement", str(CLIENTS / "requirements.txt"))


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    requirements = str(CLIENTS / "apart.txt")
    return empty_environment(tmp_path_factory.mktemp("apart"), "--requirement", requirements, locked=False)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the SDKs for node and our scripts."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("the SDKs for node are installed by npm, which is not here")
    folder = tmp_path_factory.mktemp("node")
    output_of(npm, "install", "--silent", "--ignore-scripts", "--prefix", folder, *NODE)
    for script in CLIENTS.glob("*.mjs"):
        shutil.copy(script, folder)
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


def ask(python: Path | str, script: str, url: str, server: Server, cases: Path, **extra: Any) -> dict[str, Any]:
    """What a script of `tests/clients` prints; one in JavaScript lies in the folder `python`."""
    command, folder = [str(python), str(CLIENTS / script)], REPOSITORY
    if script.endswith(".mjs"):
        command, folder = ["node", script], Path(python)
    options = [json.dumps(extra)] if extra else []
    answers: dict[str, Any] = json.loads(output_of(*command, url, model_of(server), cases, *options, cwd=folder))
    return answers


def model_of(server: Server) -> str:
    bearer = {"authorization": f"Bearer {KEY}"}
    return str(requests.get(f"{server.url}/v1/models", headers=bearer, timeout=10).json()["data"][0]["id"])


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
    """A server with a key, of a model whose template has tools and thinking. Its weights are random, but no call that
    is forced depends on weights.
    """
    folder = tmp_path_factory.mktemp("tools")
    words = tokenizer("qwen")
    target = random_model("qwen3", vocab_size=len(words), eos_token_id=words.eos_token_id)
    for name, model in (("target", target), ("drafter", with_noise(target, 0.1))):
        model.save_pretrained(folder / name)
        words.save_pretrained(folder / name)
        template = QWEN.replace("thinking", "enable_thinking")  # the name that the server knows
        (folder / name / "chat_template.jinja").write_text(template)
    (folder / "keys").write_text(KEY)
    config, log = folder / "config.yaml", folder / "log.txt"
    port, grpc_port = free_ports(2)
    config.write_text(
        f"dtype: float32\nmax_sequences: 4\n"
        f"server: {{port: {port}, grpc_port: {grpc_port}, api_keys: {folder / 'keys'}}}\n"
        f"target: {{model: {folder / 'target'}, served_name: tools}}\ndraft: {{model: {folder / 'drafter'}}}\n"
    )
    running = Server(port, grpc_port, tried_twice(lambda: start(config, log)))
    yield running
    running.process.terminate()
    running.process.wait(60)


def test_calls_through_openai_s_clients(tools_server: Server, oldest: Path, node: Path) -> None:
    answers = check(ask_python(sys.executable, tools_server, TOOLS))
    for name, reason in (("required", "tool_calls"), ("named", "stop")):
        [choice] = answers[name]["choices"]
        assert choice["finish_reason"] == reason
        for function, arguments in choice["calls"]:
            assert function == "weather"
            assert json.loads(arguments)["city"] in ("Paris", "Rome")
        assert choice["calls"]
    assert near(check(ask_python(sys.executable, tools_server, TOOLS, **PLAIN)), answers)
    assert near(check(ask_python(oldest, tools_server, TOOLS)), answers)
    assert near(check(ask_node(node, tools_server, TOOLS)), answers)


def same(
    text: str, thinking: str, calls: list[tuple[str, Any]], tokens: tuple[int, int], *, cut: bool
) -> dict[str, Any]:
    """What an answer says in whatever API: `calls` with their inputs, `tokens` of the prompt and of the output, and
    whether it was cut off.
    """
    return {"text": text, "thinking": thinking, "calls": calls, "tokens": tokens, "cut": cut}


def of_chat(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    bearer = {"authorization": f"Bearer {KEY}"}
    answer = requests.post(f"{server.url}/v1/chat/completions", json=body, headers=bearer, timeout=120).json()
    [choice], usage = answer["choices"], answer["usage"]
    message, cut = choice["message"], choice["finish_reason"] == "length"
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [(function["name"], json.loads(function["arguments"])) for function in functions]
    tokens = usage["prompt_tokens"], usage["completion_tokens"]
    return same(message["content"] or "", message.get("reasoning_content", ""), calls, tokens, cut=cut)


def of_message(answer: dict[str, Any]) -> dict[str, Any]:
    blocks, usage = answer["content"], answer["usage"]
    texts = {kind: "".join(block.get(kind) or "" for block in blocks) for kind in ("text", "thinking")}
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    tokens = usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]
    return same(texts["text"], texts["thinking"], calls, tokens, cut=answer["stop_reason"] == "max_tokens")


def of_response(answer: dict[str, Any]) -> dict[str, Any]:
    items, usage = answer["output"], answer["usage"]
    text, thinking = (
        "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])
        for kind in ("message", "reasoning")
    )
    calls = [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]
    tokens = usage["input_tokens"], usage["output_tokens"]
    return same(text, thinking, calls, tokens, cut=answer["status"] == "incomplete")


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of Anthropic's API make up."""
    message: dict[str, Any] = events[0]["message"]
    fields = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"] | {"partial_json": ""})
        elif event["type"] == "content_block_delta" and (field := fields.get(event["delta"]["type"])):
            message["content"][event["index"]][field] += event["delta"][field]
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["partial_json"])
    return message


def response_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that the events of OpenAI's API make up."""
    items: list[dict[str, Any]] = []
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    for event in events:
        if event["type"] == "response.output_item.added":
            items.append(event["item"] | {"content": [{"text": ""}]})
        elif event["type"] == "response.function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif event["type"].endswith(".delta"):
            items[event["output_index"]]["content"][0]["text"] += event["delta"]
    response: dict[str, Any] = events[-1]["response"] | {"output": items}
    return response


READERS = {"messages": (of_message, message_of), "responses": (of_response, response_of)}


def as_in_chats(api: str, script: str, server: Server, cases: Path, *pythons: Path | str) -> list[dict[str, Any]]:
    """What a script prints, from each Python, and from the first also without speculation. Each answer, whole and
    streamed, must say what that to the same chat says.
    """
    asked = {name: case["chat"] for name, case in json.loads(cases.read_text()).items() if api in case}
    chats = {name: of_chat(server, chat) for name, chat in asked.items()}
    url = f"{server.url}/v1" if api == "responses" else server.url
    found = [ask(python, script, url, server, cases) for python in pythons]
    found.append(ask(pythons[0], script, url, server, cases, **PLAIN))
    read, whole_of = READERS[api]
    for answers in (each["answers"] for each in found):
        assert [*answers] == [*chats]
        for name, answer in answers.items():
            assert read(answer["whole"]) == chats[name], name
            assert read(answer["helped"]) == chats[name], name
            assert read(whole_of(answer["events"])) == chats[name], name
            assert "".join(answer["texts"]) == chats[name]["text"], name
            assert answer.get("counted", chats[name]["tokens"][0]) == chats[name]["tokens"][0], name
    return found


def test_messages_through_anthropic_s_clients(
    server: Server, tools_server: Server, oldest_anthropic: Path, node: Path
) -> None:
    pythons = sys.executable, oldest_anthropic
    reasons = {}
    for each, cases in ((server, CHATS), (tools_server, CALLS)):
        *found, _ = as_in_chats("messages", "ask_anthropic.py", each, cases, *pythons)
        found += as_in_chats("messages", "ask_anthropic.mjs", each, cases, node)
        for answers in found:
            assert {*answers["models"]} == {model_of(each)}
        reasons |= {name: answer["whole"]["stop_reason"] for name, answer in found[0]["answers"].items()}
    expected = {"greedy": "max_tokens", "stopped": "stop_sequence", "object": "end_turn"}
    assert expected.items() <= reasons.items()
    for name in ("required", "single", "named", "thought_and_required"):
        assert reasons[name] == "tool_use"
    bad = ["BadRequestError", 400, "invalid_request_error"]
    for answers in found[:2]:
        assert answers["refused"] == {
            "no tokens": bad,
            "an unknown field": bad,
            "an image": bad,
            "another model": ["NotFoundError", 404, "not_found_error"],
            "too long": bad,
            "a wrong key": ["AuthenticationError", 401, "authentication_error"],
        }


def test_responses_through_openai_s_clients(server: Server, tools_server: Server, oldest_responses: Path) -> None:
    pythons = sys.executable, oldest_responses
    for each, cases in ((server, CHATS), (tools_server, CALLS)):
        found = as_in_chats("responses", "ask_responses.py", each, cases, *pythons)
        for answers in found:
            assert answers["parsed"].keys() == {"x", "y"}
    for answers in found:
        assert answers["refused"] == {
            "a stored answer": ["BadRequestError", 400, "store"],
            "an earlier answer": ["BadRequestError", 400, "previous_response_id"],
            "a tool of OpenAI's": ["BadRequestError", 400, "tools.0.type"],
            "no tokens": ["BadRequestError", 400, "max_output_tokens"],
            "another model": ["NotFoundError", 404, "model"],
            "a wrong key": ["AuthenticationError", 401, None],
        }


def test_langchain_s_chats(tools_server: Server, others: Path) -> None:
    found = json.loads(output_of(others, CLIENTS / "ask_langchain.py", tools_server.url, model_of(tools_server)))
    messages = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "import os"}]
    expected = of_chat(tools_server, {"messages": messages, "max_tokens": 24, "temperature": 0.7, "seed": 5})
    assert [*found] == ["chat", "responses", "messages"]
    for answers in found.values():
        assert answers["invoked"] == answers["streamed"] == expected["text"]
        assert answers["batched"] == [expected["text"]] * 2
        assert (answers["usage"]["input_tokens"], answers["usage"]["output_tokens"]) == expected["tokens"]
        assert isinstance(answers["object"]["x"], int)
        for function, arguments in answers["calls"]:
            assert function == "weather"
            assert arguments["city"] in ("Paris", "Rome")
        assert answers["calls"]


def test_pydantic_ai_s_outputs_and_tools(tools_server: Server, others: Path) -> None:
    found = json.loads(output_of(others, CLIENTS / "ask_pydantic_ai.py", tools_server.url, model_of(tools_server)))
    assert [*found] == ["chat", "responses", "messages"]
    for api, answers in found.items():
        assert {*answers["called"]} <= {"Paris", "Rome"}
        assert answers["called"]
        for name in ("output", "streamed") if api == "messages" else ("output", "streamed", "native"):
            assert answers[name]["city"] in ("Paris", "Rome")
            assert isinstance(answers[name]["sunny"], bool)


@pytest.fixture
def proxy(tools_server: Server, apart: Path, tmp_path: Path) -> Iterator[OpenAI]:
    """A client of LiteLLM's proxy, which asks our server as one of OpenAI's and as one of Anthropic's."""
    config, log, [port] = tmp_path / "config.yaml", tmp_path / "log.txt", free_ports(1)
    key = "sk-of-this-test-0123456789abcdef"
    template = (CLIENTS / "litellm.yaml").read_text()
    config.write_text(template.replace("URL", tools_server.url).replace("MODEL", model_of(tools_server)))
    command = [str(apart.with_name("litellm")), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key}  # else it asks a server for prices
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | variables)
    try:
        until = time.monotonic() + 120
        while "startup complete" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=120)
    finally:
        process.kill()
        process.wait(60)


def test_litellm_s_proxy(tools_server: Server, proxy: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "import os"}]
    asked: dict[str, Any] = {"messages": messages, "max_tokens": 24, "temperature": 0}  # it sends Anthropic no seed
    expected = of_chat(tools_server, asked)
    forced = json.loads(TOOLS.read_text())["required"]["body"]
    del forced["seed"]
    for model in ("by-chat", "by-messages"):
        whole = proxy.chat.completions.create(model=model, **asked)
        chunks = proxy.chat.completions.create(model=model, **asked, stream=True)
        texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert whole.choices[0].message.content == "".join(texts) == expected["text"]
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == expected["tokens"]
        [choice] = proxy.chat.completions.create(model=model, **forced).choices
        assert choice.finish_reason == "tool_calls"
        for call in choice.message.tool_calls:
            assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_guidellm_s_benchmark(server: Server, apart: Path, tmp_path: Path) -> None:
    weights = REPOSITORY / "demo_weights" / "triforce_serve_demo" / "target"
    options = [
        *("--backend", f"kind=openai_http,target={server.url},model={model_of(server)}"),
        *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=10"),
        *("--tokenizer", f"kind=huggingface_auto,model={weights}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
        *("--output", f"kind=json,path={tmp_path / 'found.json'}", "--disable-console-interactive"),
    ]
    output_of(apart.with_name("guidellm"), "run", *options, cwd=tmp_path)
    [benchmark] = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {"successful": 10, "incomplete": 0, "errored": 0, "total": 10}


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


@pytest.fixture
def brief(tmp_path: Path) -> Iterator[Server]:
    """A server of a short context: an answer that nothing limits ends within a second or two."""
    config, log = tmp_path / "config.yaml", tmp_path / "log.txt"
    port, grpc_port = free_ports(2)
    config.write_text(f"target: {{context_length: 128}}\nserver: {{port: {port}, grpc_port: {grpc_port}}}\n")
    running = Server(port, grpc_port, tried_twice(lambda: start(config, log)))
    yield running
    running.process.terminate()
    assert running.process.wait(120) == 0, log.read_text()


def test_what_the_openapi_document_promises_is_kept(brief: Server, others: Path, tmp_path: Path) -> None:
    """3,000 cases and more; a 504 is possible because a case may set `timeout_s`."""
    document = f"{brief.url}/openapi.json"
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
    assert statuses.total() >= 3000
    assert {status for status in statuses if status >= 500} <= {504}
