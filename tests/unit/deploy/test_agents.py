"""Requests with the fields and shapes of those of Claude Code and Codex, and calls with arguments that no float and no
Unicode text can hold.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from deploy.openai_api.routes import http_app
from tests.answering import Answering, service_of
from tests.chat_models import tokenizer

COMMAND = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}, "background": {"type": "boolean"}},
    "required": ["command"],
    "additionalProperties": False,
}
ARGUMENTS = '{"command": "ls", "timeout": 5}'
CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE_CODE: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 32000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: version=1; id=abc;"},
        {"type": "text", "text": "You are an agent.", **CACHED},
        {"type": "text", "text": "\nUse the tools.", **CACHED},
    ],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "<a>1</a>"}, {"type": "text", "text": "hello", **CACHED}],
        },
        {"role": "system", "content": "There are agents of these kinds."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I look.", "signature": "msg_1"},
                {"type": "tool_use", "id": "call_1", "name": "Bash", "input": json.loads(ARGUMENTS)},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "a b", "is_error": False, **CACHED},
            ],
        },
    ],
    "tools": [{"name": "Bash", "description": "Runs a command.", "input_schema": COMMAND}],
    "metadata": {"user_id": '{"device_id": "1", "session_id": "2"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
CODEX: dict[str, Any] = {
    "model": "demo",
    "stream": True,
    "store": False,
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "Help."}]},
        {
            "type": "message",
            "id": "msg_2",
            "role": "user",
            "content": [{"type": "input_text", "text": "<cwd>/</cwd>"}, {"type": "input_text", "text": "hello"}],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "I look."}],
            "encrypted_content": None,
        },
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "Bash", "arguments": ARGUMENTS},
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "a b"},
    ],
    "tools": [
        {"type": "function", "name": "Bash", "description": "Runs a command.", "strict": False, "parameters": COMMAND},
        {
            "type": "namespace",
            "name": "helpers",
            "description": "Other agents.",
            "tools": [
                {"type": "function", "name": "close", "description": "…", "strict": False, "parameters": COMMAND}
            ],
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "1",
    "client_metadata": {"session_id": "1", "x-metadata": "{}"},
}
ROUTES = {"/v1/messages?beta=true": CLAUDE_CODE, "/v1/responses": CODEX}
CALL = f'<tool_call>\n{{"name": "Bash", "arguments": {ARGUMENTS}}}\n</tool_call>'


def answer(path: str, body: dict[str, Any], text: str) -> tuple[Any, str]:
    """The response, and the prompt that the model was given."""
    pipelines = Answering("qwen", text, cut=1)
    with TestClient(http_app(service_of("qwen", pipelines)), raise_server_exceptions=False) as http:
        found = http.post(path, json=body)
    assert found.status_code == 200, found.text
    prompt: str = tokenizer("qwen").decode(list(pipelines.requests[-1].prompt_token_ids))
    return found, prompt


@pytest.mark.parametrize("path", ROUTES)
def test_the_request_of_an_agent_is_answered_by_a_call(path: str) -> None:
    found, prompt = answer(path, ROUTES[path], CALL)
    events = [json.loads(line.removeprefix("data: ")) for line in found.text.splitlines() if line.startswith("data: ")]
    arguments = "".join(
        event["delta"] if isinstance(event["delta"], str) else event["delta"].get("partial_json", "")
        for event in events
        if event["type"].endswith(("block_delta", "arguments.delta"))
    )
    assert json.loads(arguments) == json.loads(ARGUMENTS)
    assert events[-1]["type"] in ("message_stop", "response.completed")
    for told in ("hello", "I look.", '"command": "ls"', "a b", "Runs a command."):
        assert told in prompt
    for left_out in ("billing", "web_search"):
        assert left_out not in prompt
    assert ("helpers.close" in prompt) == (path == "/v1/responses")


def test_the_input_of_a_call_holds_what_json_holds() -> None:
    """The model writes arguments freely: numbers beyond floats and halves of surrogate pairs are JSON."""
    arguments = '{"timeout": 1e999, "more": 1' + "0" * 5000 + ', "command": "\\ud800"}'
    found, _ = answer("/v1/messages", CLAUDE_CODE | {"stream": False}, CALL.replace(ARGUMENTS, arguments))
    [block] = found.json()["content"]
    assert block["input"] == {"timeout": 1.7976931348623157e308, "more": 1.7976931348623157e308, "command": "\ud800"}


def test_what_stands_below_the_billing_line_is_kept() -> None:
    system = "x-anthropic-billing-header: version=1; id=abc;\nBe brief."
    _, prompt = answer("/v1/messages", CLAUDE_CODE | {"system": system}, CALL)
    assert "Be brief." in prompt
    assert "billing" not in prompt
