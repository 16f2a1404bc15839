"""Requests whose schemas are none, or that are nested deeper than Python goes: they are refused or answered, whatever
the model's form of calls, and the server never fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from deploy.chat.template import ChatTemplate
from deploy.openai_api.routes import http_app
from tests.answering import ANSWERS, Answering, service_of
from tests.chat_models import tokenizer


def doubling(last: dict[str, Any]) -> dict[str, Any]:
    """Definitions that each name the next one twice: whoever follows all ways never ends."""
    defs: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    return defs | {"d40": last}


ODD: list[Any] = [
    {"$ref": "#"},
    {"$ref": "#/$defs/missing"},
    {"required": [1]},
    {"required": 3},
    {"properties": ["x"]},
    {"properties": {"x": {"anyOf": 3}}},
    {"properties": {"x": {"enum": ["a", 1]}}},
    {"properties": {"x": {"type": "string", "enum": ["a", 1]}}},
    {"properties": {"x": {"type": "string", "enum": [1]}}},
    {"properties": {"x": {"type": "string", "minLength": "x"}}},
    {"properties": {"x": {"type": "string", "minLength": 3, "maxLength": 2}}},
    {"properties": {"x": {"type": ["string", "null"], "anyOf": [{"$ref": "#/properties/x"}]}}},
    {"properties": {"x": {"$ref": "#/properties/x"}}},
    {"properties": {"x": {"anyOf": [{"anyOf": [{"$ref": "#/properties/x"}] * 3}] * 3}}},
    {"properties": {"x": {"type": "array", "items": {"enum": [*range(10**4)]}, "uniqueItems": True}}},
    {"properties": {"x": {"propertyNames": {"minLength": "x"}}}},
    {"type": "string"},
    {"type": 3},
    {"properties": {"x": {"const": {"$ref": 5}}}},
    {"properties": {"x": {"type": "string", "minLength": float("inf")}}},
    {"properties": {"x": {"type": "string", "default": float("nan")}}},
    {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": doubling({"type": ["string", "integer"]})},
    {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": doubling({"type": "string"})},
    {
        "properties": {"x": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/d0"}}},
        "$defs": doubling({"enum": [1]}),
    },
]
TEMPLATES = Path(__file__).parents[2] / "templates"
CODER = "Qwen3-Coder.jinja"  # whose calls have parameters as text
FAMILIES = [*ANSWERS, CODER]


@contextmanager
def http_of(family: str) -> Iterator[TestClient]:
    """The API of a model whose template is that of a family, or in a file."""
    own = family if family in ANSWERS else "qwen"
    service = service_of(own, Answering(own, ANSWERS[own], cut=0))
    if own != family:
        template = ChatTemplate(tokenizer(own), str(TEMPLATES / family), service.encoder, 10**6)
        service.chat = template
    with TestClient(http_app(service), raise_server_exceptions=False) as http:
        yield http


def status_of(http: TestClient, path: str, body: Any) -> int:
    content = body if isinstance(body, str) else json.dumps({"model": "demo"} | body)
    answer = http.post(path, content=content, headers={"content-type": "application/json"})
    if answer.status_code == 400:
        message = answer.json()["error"]["message"]
        assert ":" in message, message
    return answer.status_code


def tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_that_are_no_schema_end_no_request_in_a_failure(family: str) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}
    with http_of(family) as http:
        found = {str(odd): status_of(http, "/v1/chat/completions", chat | {"tools": [tool(odd)]}) for odd in ODD}
    assert {*found.values()} == {200, 400}, found
    assert found[str({"type": "string"})] == found[str({"required": 3})] == 400


def test_an_error_names_the_tool_that_is_to_blame() -> None:
    tools = [tool({"type": "object"}), tool({"type": "object", "properties": ["x"]})]
    tools[1]["function"]["name"] = "g"
    body = {"model": "demo", "messages": [{"role": "user", "content": "a"}], "tool_choice": "required", "tools": tools}
    with http_of("qwen") as http:
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools.1.function.parameters"


CHAT = '"messages": [{"role": "user", "content": "a"}]'
DEEP = {  # bodies with %s in place of the deep value
    "/v1/chat/completions": [
        CHAT + ', "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"default": %s}}}',
        CHAT + ', "tools": [{"type": "function", "function": {"name": "f", "parameters": {"default": %s}}}]',
        CHAT + ', "tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", '
        '"parameters": {"default": %s}}}]',
        CHAT + ', "chat_template_kwargs": {"x": %s}',
        CHAT + ', "guided_json": {"default": %s}',
        '"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": %s}]}]',
        '"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"id": "a", "function": '
        '{"name": "f", "arguments": "{\\"x\\": %s}"}}]}]',
    ],
    "/v1/messages": [
        '"max_tokens": 9, '
        + CHAT
        + ', "output_config": {"format": {"type": "json_schema", "schema": {"default": %s}}}',
        '"max_tokens": 9, ' + CHAT + ', "tools": [{"name": "f", "input_schema": {"default": %s}}]',
        '"max_tokens": 9, "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": '
        '"tool_use", "id": "a", "name": "f", "input": {"x": %s}}]}, {"role": "user", "content": [{"type": '
        '"tool_result", "tool_use_id": "a"}]}]',
        '"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", '
        '"content": %s}]}]',
    ],
    "/v1/responses": [
        '"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"default": %s}}}',
        '"input": "a", "metadata": {"x": %s}',
        '"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"default": %s}}]',
        '"input": %s',
    ],
}


@pytest.mark.parametrize("path", DEEP)
@pytest.mark.parametrize("depth", [100, 240, 300, 480, *range(936, 972, 3), 2000])
def test_deep_values_are_refused_or_answered(path: str, depth: int) -> None:
    values = [
        "[" * depth + "]" * depth,
        '{"not": ' * depth + "1" + "}" * depth,
        '[{"content":' * depth + "1" + "}]" * depth,
    ]
    with http_of("qwen") as http:
        for body in DEEP[path]:
            for value in values:
                quoted = value.replace('"', '\\"') if "arguments" in body else value
                status = status_of(http, path, '{"model": "demo", ' + body.replace("%s", quoted) + "}")
                assert status in (200, 400), (body, value[:20])


INFINITE = [
    '"input": "a", "metadata": {"x": 1e999}',
    '"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {"default": NaN}}]',
    '"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"default": 1e999}}}',
]


@pytest.mark.parametrize("body", INFINITE)
@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_response_repeats_no_number_that_json_cannot_hold(body: str, stream: str) -> None:
    with http_of("qwen") as http:
        content = f'{{"model": "demo", "stream": {stream}, {body}}}'
        answer = http.post("/v1/responses", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("metadata", "tools", "text")
