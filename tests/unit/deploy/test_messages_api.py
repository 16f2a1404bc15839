"""Anthropic's Messages API over a pipeline that answers with given tokens, through the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic, APIStatusError, AuthenticationError, BadRequestError, NotFoundError
from starlette.testclient import TestClient

from deploy.keys import ApiKeys
from deploy.openai_api import streaming
from deploy.openai_api.guard import guarded
from deploy.openai_api.routes import http_app
from tests.answering import ANSWERS, ARGUMENTS, CALL, PARAMETERS, TOOLS, Answering, service_of
from tests.chat_models import tokenizer
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.errors import UnavailableError

USER = {"role": "user", "content": "How warm is it in Łódź?"}
TOOL = {"name": "weather", "description": "…", "input_schema": PARAMETERS}
CALLED = {"type": "tool_use", "id": "123456789", "name": "weather", "input": {"city": "Łódź"}}
RESULT = {"type": "tool_result", "tool_use_id": "123456789", "content": "7 °C"}


@contextmanager
def http_of(pipelines: Any, family: str = "qwen", keys: Path | None = None) -> Iterator[TestClient]:
    service = service_of(family, pipelines)
    with TestClient(guarded(http_app(service), service, ApiKeys(keys)), raise_server_exceptions=False) as http:
        yield http


@contextmanager
def answered(text: str = "", family: str = "qwen", **more: Any) -> Iterator[tuple[Anthropic, Answering]]:
    pipelines = Answering(family, text, cut=more.pop("cut", 0), **more)
    with http_of(pipelines, family) as http:
        client = Anthropic(base_url="http://testserver", api_key="none", http_client=http, max_retries=0, timeout=60)
        yield client, pipelines


def ask(client: Anthropic, **fields: Any) -> Any:
    return client.messages.create(**({"model": "demo", "max_tokens": 4096, "messages": [USER]} | fields))


def events(client: Anthropic, **fields: Any) -> list[dict[str, Any]]:
    return [event.to_dict() for event in ask(client, stream=True, **fields)]


def folded(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's events make, which checks their order."""
    kinds = [event["type"] for event in found]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    message, texts = found[0]["message"], list[str]()
    assert message["content"] == []
    assert message["stop_reason"] is None
    open_at = None
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert open_at is None
            assert event["index"] == len(message["content"])
            open_at, texts = event["index"], []
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_at
            delta = event["delta"]
            if delta["type"] == "signature_delta":
                message["content"][-1]["signature"] = delta["signature"]
            else:
                texts.append(delta.get("text", delta.get("thinking", delta.get("partial_json"))))
        else:
            assert event == {"type": "content_block_stop", "index": open_at}
            block, open_at = message["content"][-1], None
            name = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
            block[name] = json.loads("".join(texts)) if name == "input" else "".join(texts)
    assert open_at is None
    return {**message, **found[-2]["delta"], "usage": found[-2]["usage"]}


def same(message: dict[str, Any]) -> dict[str, Any]:
    """The message without what is drawn anew each time."""
    blocks = [{name: block[name] for name in block if name not in ("id", "signature")} for block in message["content"]]
    return {name: message[name] for name in message if name not in ("id", "triforce")} | {"content": blocks}


@pytest.mark.parametrize("family", ANSWERS)
@pytest.mark.parametrize("cut", range(8))
def test_a_stream_is_the_whole_answer(family: str, cut: int) -> None:
    with answered(ANSWERS[family], family, cut=cut) as (client, _):
        whole = ask(client, tools=[TOOL]).to_dict()
        streamed = folded(events(client, tools=[TOOL]))
    assert same(streamed) == same(whole)
    thinking = [{"type": "thinking", "thinking": "I look.\n"}] if family == "qwen" else []
    called = {"type": "tool_use", "name": "weather", "input": json.loads(ARGUMENTS)}
    assert same(whole)["content"] == [*thinking, called]
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] == (11 if thinking else 0)


def test_the_client_s_own_stream_ends_with_the_message() -> None:
    with (
        answered(ANSWERS["qwen"]) as (client, _),
        client.messages.stream(model="demo", max_tokens=99, messages=[USER], tools=[TOOL]) as stream,
    ):
        assert [event.type for event in stream][-1] == "message_stop"
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert final.content[-1].input == json.loads(ARGUMENTS)


CHATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "system": (
        {"system": "Be brief.", "messages": [USER]},
        {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    ),
    "blocks": (
        {
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=3f;"},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "Be kind."},
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "user", "content": "c"},
            ],
        },
        {"messages": [{"role": "system", "content": "Be brief.\nBe kind."}, {"role": "user", "content": "a\nb\nc"}]},
    ),
    "tools": (
        {
            "tools": [TOOL],
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "I look.", "signature": "x"},
                        {"type": "redacted_thinking", "data": "…"},
                        {"type": "text", "text": "Wait."},
                        CALLED,
                        CALLED | {"id": "abcdefghi"},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        RESULT,
                        RESULT | {"content": [{"type": "text", "text": "8"}]},
                        {"type": "text", "text": "?"},
                    ],
                },
            ],
        },
        {
            "tools": TOOLS,
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": "Wait.",
                    "reasoning_content": "I look.",
                    "tool_calls": [
                        {
                            "id": id_,
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Łódź"}'},
                        }
                        for id_ in ("123456789", "abcdefghi")
                    ],
                },
                {"role": "tool", "tool_call_id": "123456789", "content": "7 °C"},
                {"role": "tool", "tool_call_id": "123456789", "content": "8"},
                {"role": "user", "content": "?"},
            ],
        },
    ),
    "late system": (
        {"messages": [USER, {"role": "system", "content": "Be brief."}]},
        {"messages": [USER, {"role": "system", "content": "Be brief."}]},
    ),
    "begun": (
        {"messages": [USER, {"role": "assistant", "content": "It is"}]},
        {
            "messages": [USER, {"role": "assistant", "content": "It is"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    "no tools": ({"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "none"}}, {"messages": [USER]}),
    "sampling": (
        {"messages": [USER], "temperature": 0.3, "top_p": 0.9, "top_k": 7, "stop_sequences": ["x"], "seed": 5},
        {"messages": [USER], "temperature": 0.3, "top_p": 0.9, "top_k": 7, "stop": ["x"], "seed": 5},
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_the_engine_gets_the_request_of_the_same_chat(name: str) -> None:
    body, chat = CHATS[name]
    pipelines = Answering("qwen", "hm", cut=0)
    seed = {"seed": 5, "speculation": {"lookaheads": [3, 2]}, "cache_salt": "s", "priority": 2, "max_tokens": 9}
    with http_of(pipelines) as http:
        for path, fields in ("/v1/messages", body), ("/v1/chat/completions", chat):
            answer = http.post(path, json={"model": "demo", **fields, **seed})
            assert answer.status_code == 200, answer.text
    for request in pipelines.requests:
        request.ClearField("timeout_s")  # what is left of it
    one, other = pipelines.requests
    assert one == other


def test_system_messages_that_a_template_cannot_have_late_are_the_user_s() -> None:
    body = {"model": "demo", "max_tokens": 9, "messages": [USER, {"role": "system", "content": "Be brief."}]}
    pipelines = Answering("mistral", "hm", cut=0)
    with http_of(pipelines, "mistral") as http:
        assert http.post("/v1/messages", json=body).status_code == 200
    prompt = tokenizer("mistral").decode(pipelines.requests[0].prompt_token_ids)
    assert f"[INST]{USER['content']}\nBe brief.[/INST]" in prompt


@pytest.mark.parametrize(
    ("text", "fields", "length", "reason", "stop"),
    [
        ("Warm.", {}, False, "end_turn", None),
        ("Warm.", {"max_tokens": 1}, True, "max_tokens", None),
        ("Warm.", {"max_tokens": 10**6}, True, "model_context_window_exceeded", None),
        ("Warm and dry.", {"stop_sequences": ["dry", " and"]}, False, "stop_sequence", " and"),
        (f"<tool_call>\n{CALL['qwen'][:-9]}", {"tools": [TOOL], "max_tokens": 1}, True, "max_tokens", None),
        (f"<tool_call>\n{CALL['qwen']}", {"tools": [TOOL], "stop_sequences": ["Ł"]}, False, "stop_sequence", "Ł"),
        (ANSWERS["qwen"], {"tools": [TOOL]}, False, "tool_use", None),
    ],
)
def test_why_an_answer_ends(text: str, fields: dict[str, Any], length: bool, reason: str, stop: str | None) -> None:
    with answered(text, length=length) as (client, _):
        whole = ask(client, **fields)
        [delta] = [each["delta"] for each in events(client, **fields) if each["type"] == "message_delta"]
    assert (whole.stop_reason, whole.stop_sequence) == (reason, stop)
    assert (delta["stop_reason"], delta["stop_sequence"]) == (reason, stop)
    assert all(block.input == {} for block in whole.content if block.type == "tool_use" and reason != "tool_use")


@pytest.mark.parametrize(
    ("thinking", "content"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, [("thinking", "hm"), ("text", "Warm.")]),
        ({"type": "adaptive", "display": "omitted"}, [("thinking", ""), ("text", "Warm.")]),
        ({"type": "disabled"}, [("text", "Warm.")]),
    ],
)
def test_thinking_as_it_is_asked_for(thinking: Any, content: list[tuple[str, str]]) -> None:
    with answered("<think>\nhm</think>\n\nWarm.") as (client, _):
        whole = ask(client, thinking=thinking).to_dict()
        assert same(folded(events(client, thinking=thinking))) == same(whole)
    assert [(block["type"], block[block["type"]]) for block in whole["content"]] == content


@pytest.mark.parametrize(
    ("choice", "calls"),
    [({"type": "any"}, True), ({"type": "tool", "name": "weather"}, True), ({"type": "auto"}, False)],
)
def test_a_choice_of_tools_forces_calls(choice: Any, calls: bool) -> None:
    with answered(ANSWERS["qwen"]) as (client, pipelines):
        assert ask(client, tools=[TOOL], tool_choice=choice).stop_reason == "tool_use"
    assert bool(pipelines.requests[0].grammar) == calls


def test_one_call_if_several_are_not_wanted() -> None:
    with answered(ANSWERS["qwen"] + ANSWERS["qwen"].partition("\n\n")[2]) as (client, _):
        kinds = [
            [block.type for block in ask(client, tools=[TOOL], tool_choice={"type": "auto", **more}).content]
            for more in ({}, {"disable_parallel_tool_use": True})
        ]
    assert kinds == [["thinking", "tool_use", "tool_use"], ["thinking", "tool_use"]]


def test_an_answer_of_a_form() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    with answered('{"x": 1}') as (client, pipelines):
        ask(client, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "high"})
    assert '"integer"' in pipelines.requests[0].grammar


def test_tokens_are_counted_as_they_are_read() -> None:
    fields: Any = {"system": "Be brief.", "tools": [TOOL], "messages": [USER]}
    with answered("hm") as (client, pipelines):
        counted = client.messages.count_tokens(model="demo", **fields).input_tokens
        assert not pipelines.requests
        assert ask(client, **fields).usage.input_tokens == counted


class Cached(Answering):
    """Has found a part of the prompt."""

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        yield pb.DecodeEvent(entered=True, cached_tokens=5)
        async for event in super().decode(request):
            yield event


def test_tokens_that_were_found_are_counted_apart() -> None:
    with http_of(Cached("qwen", "hm", cut=0)) as http:
        client = Anthropic(base_url="http://testserver", api_key="none", http_client=http)
        total = client.messages.count_tokens(model="demo", messages=[USER]).input_tokens
        found = events(client)
    for usage in found[0]["message"]["usage"], found[-2]["usage"]:
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (total - 5, 5)


BLOCK = {"type": "text", "text": "a"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens: 0 must be at least 1"),
    ({"messages": []}, "messages: [] must hold at least one message"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role: 'tool'"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type: 'image' is not"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text: is required"),
    ({"messages": [{"role": "user", "content": [CALLED]}]}, "messages.0.content.0.type: 'tool_use' is not"),
    (
        {"messages": [{"role": "user", "content": [BLOCK | {"citations": {"enabled": True}}]}]},
        "messages.0.content.0.citations: ",
    ),
    ({"system": [{"type": "image"}]}, "system.0.type: 'image' is not supported"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type: "),
    ({"tools": [TOOL | {"name": "a b"}]}, "tools.0.name: 'a b' must be 1 to 128"),
    (
        {"tools": [TOOL | {"input_schema": {"type": "nope"}}], "tool_choice": {"type": "any"}},
        "tools.0.input_schema: ",
    ),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: None must be given with type: tool"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name: 'x' must be the name"),
    (
        {"messages": [USER, {"role": "assistant", "content": [CALLED]}]},
        "messages.1: 'a message of the assistant' must not end in tool_use",
    ),
    (
        {"messages": [{"role": "user", "content": [RESULT | {"content": [BLOCK] * 17_000}]}]},
        "messages: [{'content': [{...}], 'role': 'user'}] is refused: has 17002 entries",
    ),
    ({"stop_sequences": [""]}, "stop_sequences: '' must not hold an empty string"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits.0.type: "),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: "),
    ({"nonsense": 1}, "nonsense: 1 is not a field of this request"),
    ({"messages": [{"role": "user", "content": "a " * 40_000}]}, "prompt is too long: messages: "),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_wrong_bodies_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with answered() as (client, _), pytest.raises(BadRequestError) as caught:
        ask(client, extra_body=fields)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(message), body


def test_errors_have_the_api_s_form(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: secret\n")
    with http_of(Answering("qwen", "hm", cut=0), keys=keys) as http:
        client = Anthropic(base_url="http://testserver", api_key="secret", http_client=http, max_retries=0)
        assert ask(client).stop_reason == "end_turn"
        with pytest.raises(AuthenticationError, match="authentication_error"):
            ask(client.with_options(api_key="other"))
        with pytest.raises(NotFoundError, match="not_found_error"):
            ask(client, model="other")
        for path, status in (("/v1/messages/batches", 404), ("/v1/messages", 405)):
            answer = http.get(path, headers={"x-api-key": "secret"})
            assert answer.status_code == status
            assert answer.json()["type"] == "error"
        malformed = http.post("/v1/messages", content="{", headers={"x-api-key": "secret"})
        assert malformed.json()["error"]["type"] == "invalid_request_error"
        assert malformed.json()["request_id"] == malformed.headers["x-request-id"]


class Failing(Answering):
    """Fails after its text."""

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        async for event in super().decode(request):
            if event.finish_reason:
                raise UnavailableError("no replica can serve")
            yield event


def test_an_error_in_a_stream_is_an_event() -> None:
    with http_of(Failing("qwen", "hm", cut=0)) as http:
        client = Anthropic(base_url="http://testserver", api_key="none", http_client=http, max_retries=0)
        with pytest.raises(APIStatusError) as caught:
            events(client, extra_body={"timeout_s": 1})
    assert "error" in str(caught.value)


class Slow(Answering):
    """Waits before each token."""

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        for token in self.ids:
            await asyncio.sleep(0.02)
            yield pb.DecodeEvent(token_ids=[token], origins=b"\0", stats=pb.DecodeStats(decoded=1))
        yield pb.DecodeEvent(finish_reason=self.end, stats=pb.DecodeStats(decoded=1, tallies=[pb.Tally(rounds=1)] * 3))


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
def test_a_stream_that_has_nothing_to_show_is_alive(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the thinking is hidden or the beginning of a call is read: tokens come, and nothing of them goes out."""
    monkeypatch.setattr(streaming, "IDLE_S", 0.1)
    call = f'<tool_call>\n{{"name": "weather",{" " * 40}"arguments": {{}}}}\n</tool_call>'
    with http_of(Slow("qwen", call, cut=0)) as http:
        body: dict[str, Any] = {
            "/v1/messages": {"messages": [USER], "max_tokens": 999, "tools": [TOOL]},
            "/v1/chat/completions": {"messages": [USER], "tools": TOOLS},
            "/v1/responses": {"input": "a", "tools": [{"type": "function", "name": "weather", "parameters": {}}]},
        }[path]
        with http.stream("POST", path, json=body | {"model": "demo", "stream": True}) as answer:
            lines = [line for line in answer.iter_lines() if line]
    sign = "event: ping" if path == "/v1/messages" else ": waiting"
    call = {"/v1/messages": "tool_use", "/v1/chat/completions": "tool_calls", "/v1/responses": '"function_call"'}[path]
    first = next(number for number, line in enumerate(lines) if call in line)
    assert lines[:first].count(sign) >= 3
    assert lines.count(sign) < 40


def test_the_model_is_listed() -> None:
    with answered() as (client, _):
        [model] = client.models.list()
        assert model == client.models.retrieve("demo")
    assert (model.id, model.display_name, model.type) == ("demo", "demo", "model")
