"""OpenAI's Responses API over a pipeline that answers with given tokens, through the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from openai.types.responses import Response
from pydantic import BaseModel
from starlette.testclient import TestClient

from deploy.errors import OverloadedError
from deploy.openai_api import streaming
from deploy.openai_api.routes import http_app
from tests.answering import ANSWERS, ARGUMENTS, CALL, PARAMETERS, TOOLS, Answering, service_of
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.errors import ContextLengthError, InvalidValueError

USER = {"role": "user", "content": "How warm is it in Łódź?"}
TOOL = {"type": "function", "name": "weather", "description": "…", "parameters": PARAMETERS, "strict": False}


@contextmanager
def answered(text: str = "", family: str = "qwen", **more: Any) -> Iterator[tuple[OpenAI, Answering]]:
    pipelines = Answering(family, text, cut=more.pop("cut", 0), **more)
    with TestClient(http_app(service_of(family, pipelines)), raise_server_exceptions=False) as http:
        yield OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0), pipelines


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.responses.create(**({"model": "demo", "input": [USER], "store": False} | fields))


def folded(events: list[Any]) -> dict[str, Any]:
    """The response in the last event, which all others must have told before, in order."""
    found = [event.to_dict() for event in events]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in found[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items) - (kind != "output_item.added")
        if kind == "output_item.added":
            assert not items or items[-1]["status"] != "in_progress"
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            texts = []
        elif kind == "output_item.done":
            items[-1] = event["item"]
        else:
            assert event["item_id"] == items[-1]["id"]
            if kind.endswith(".delta"):
                texts.append(event["delta"])
            elif "part" not in kind:
                assert event.get("text", event.get("arguments")) == "".join(texts)
    response: dict[str, Any] = found[-1]["response"]
    assert found[-1]["type"] == f"response.{response['status']}"
    assert items == response["output"]
    return response


def same(response: dict[str, Any]) -> dict[str, Any]:
    """The response without what is drawn anew each time."""
    drawn = ("id", "call_id", "created_at", "completed_at", "triforce")
    items = [{name: item[name] for name in item if name not in drawn} for item in response["output"]]
    return {name: response[name] for name in response if name not in drawn} | {"output": items}


@pytest.mark.parametrize("family", ANSWERS)
@pytest.mark.parametrize("cut", range(8))
def test_a_stream_is_the_whole_answer(family: str, cut: int) -> None:
    text = ANSWERS[family] if family == "llama" else ANSWERS[family].replace("<tool_call>", "So.\n<tool_call>")
    with answered(text, family, cut=cut) as (client, _):
        whole = ask(client, tools=[TOOL])
        streamed = folded([*ask(client, tools=[TOOL], stream=True)])
    assert same(streamed) == same(whole.to_dict())
    Response.model_validate(whole.model_dump())
    kinds = [item.type for item in whole.output]
    assert kinds == {"qwen": ["reasoning", "message", "function_call"]}.get(family, ["function_call"])
    assert json.loads(whole.output[-1].arguments) == json.loads(ARGUMENTS)
    if family == "qwen":
        assert whole.output[0].content[0].text == "I look.\n"
        assert whole.output_text == "So."
        assert whole.usage.output_tokens_details.reasoning_tokens == 11
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens


def test_the_client_s_own_stream_ends_with_the_response() -> None:
    with (
        answered("<think>hm</think>Warm.") as (client, _),
        client.responses.stream(model="demo", input="a") as stream,
    ):
        assert [event.type for event in stream][-1] == "response.completed"
        assert stream.get_final_response().output_text == "Warm."


def said(kind: str, text: str) -> list[dict[str, Any]]:
    return [{"type": kind, "text": text}]


WHOLE_CHAT = [
    {"type": "message", "role": "developer", "content": said("input_text", "Be kind.")},
    {"type": "message", "role": "user", "content": said("input_text", "a"), "id": "msg_1", "status": "completed"},
    {"role": "user", "content": "b"},
    {
        "type": "reasoning",
        "id": "rs",
        "summary": [],
        "content": said("reasoning_text", "hm"),
        "encrypted_content": None,
    },
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_2",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}],
        "phase": "commentary",
    },
    {"type": "function_call", "id": "fc", "call_id": "123456789", "name": "weather", "arguments": '{"city": "Łódź"}'},
    {
        "type": "function_call",
        "call_id": "abcdefghi",
        "namespace": "far",
        "name": "weather",
        "arguments": '{"city": "Łódź"}',
    },
    {"type": "function_call_output", "call_id": "123456789", "output": "7 °C"},
    {"type": "function_call_output", "call_id": "abcdefghi", "output": said("input_text", "8 °C")},
]
CHATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"input": "a"}, {"messages": [{"role": "user", "content": "a"}]}),
    "instructions": (
        {"input": "a", "instructions": "Be brief."},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}]},
    ),
    "items": (
        {
            "instructions": "Be brief.",
            "input": WHOLE_CHAT,
            "tools": [TOOL, {"type": "namespace", "name": "far", "tools": [TOOL]}, {"type": "web_search"}],
            "tool_choice": "auto",
        },
        {
            "tools": [*TOOLS, {"type": "function", "function": TOOLS[0]["function"] | {"name": "far.weather"}}],
            "messages": [
                {"role": "system", "content": "Be brief.\nBe kind."},
                {"role": "user", "content": "a\nb"},
                {
                    "role": "assistant",
                    "reasoning_content": "hm",
                    "content": "Wait.",
                    "tool_calls": [
                        {"id": id_, "type": "function", "function": {"name": name, "arguments": '{"city": "Łódź"}'}}
                        for id_, name in (("123456789", "weather"), ("abcdefghi", "far.weather"))
                    ],
                },
                {"role": "tool", "tool_call_id": "123456789", "content": "7 °C"},
                {"role": "tool", "tool_call_id": "abcdefghi", "content": "8 °C"},
            ],
        },
    ),
    "choice": (
        {"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"}},
        {
            "messages": [{"role": "user", "content": "a"}],
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        },
    ),
    "form": (
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS, "strict": True}}},
        {
            "messages": [{"role": "user", "content": "a"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}},
        },
    ),
    "any object": (
        {"input": "a", "text": {"format": {"type": "json_object"}}},
        {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}},
    ),
    "sampling": (
        {"input": "a", "temperature": 0.3, "top_p": 0.9, "max_output_tokens": 7},
        {"messages": [{"role": "user", "content": "a"}], "temperature": 0.3, "top_p": 0.9, "max_tokens": 7},
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_the_engine_gets_the_request_of_the_same_chat(name: str) -> None:
    body, chat = CHATS[name]
    more = {"seed": 5, "speculation": {"lookaheads": [3, 2]}, "cache_salt": "s", "priority": 2}
    with answered("hm") as (client, pipelines):
        ask(client, extra_body=more, **body)
        client.chat.completions.create(model="demo", extra_body=more, **chat)
    for request in pipelines.requests:
        request.ClearField("timeout_s")  # what is left of it
    one, other = pipelines.requests
    assert one == other


def test_a_call_in_a_namespace_goes_back_there() -> None:
    call = CALL["qwen"].replace("weather", "far.weather")
    with answered(f"<tool_call>\n{call}\n</tool_call>") as (client, _):
        found = ask(client, tools=[{"type": "namespace", "name": "far", "tools": [TOOL]}])
    [item] = found.output
    assert (item.name, item.namespace) == ("weather", "far")


@pytest.mark.parametrize(
    ("text", "fields", "length", "status", "last"),
    [
        ("Warm.", {}, False, "completed", "completed"),
        ("Warm.", {"max_output_tokens": 1}, True, "incomplete", "incomplete"),
        (f"<tool_call>\n{CALL['qwen'][:-9]}", {"tools": [TOOL]}, True, "incomplete", "incomplete"),
        (ANSWERS["qwen"], {"tools": [TOOL]}, False, "completed", "completed"),
    ],
)
def test_how_an_answer_ends(text: str, fields: dict[str, Any], length: bool, status: str, last: str) -> None:
    with answered(text, length=length) as (client, _):
        found = ask(client, **fields)
        streamed = folded([*ask(client, stream=True, **fields)])
    assert (found.status, found.output[-1].status) == (streamed["status"], streamed["output"][-1]["status"])
    assert (found.status, found.output[-1].status) == (status, last)
    reason = found.incomplete_details and found.incomplete_details.reason
    assert reason == ("max_output_tokens" if status == "incomplete" else None)


def test_an_object_as_the_client_parses_it() -> None:
    class Place(BaseModel):
        city: str

    with answered('<think>hm</think>{"city": "Łódź"}') as (client, _):
        found = client.responses.parse(model="demo", input="a", text_format=Place)
    assert found.output_parsed == Place(city="Łódź")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store: True is not supported"),
    ({"previous_response_id": "resp_1"}, "previous_response_id: 'resp_1' is not supported"),
    ({"conversation": "c"}, "conversation: 'c' is not supported"),
    ({"background": True}, "background: True is not supported"),
    ({"truncation": "auto"}, "truncation: 'auto' is not supported"),
    ({"include": ["message.input_image.image_url"]}, "include.0: "),
    ({"input": []}, "input: [] must hold at least one message"),
    ({"input": 3}, "input: 3 is refused: must be a text or a list of items"),
    ({"input": [{"role": "user"}]}, "input.0.content: is required"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type: 'item_reference' is not supported"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type: 'input_image'"),
    ({"tools": [{"type": "file_search"}]}, "tools.0.type: 'file_search' is not supported"),
    ({"tools": [TOOL | {"name": "a b"}]}, "tools.0.name: 'a b' must be 1 to 128"),
    (
        {
            "tools": [
                {"type": "web_search"},
                {"type": "namespace", "name": "a", "tools": [TOOL, TOOL | {"name": "a b"}]},
            ]
        },
        "tools.1.tools.1.name: 'a.a b' must be 1 to 128",
    ),
    (
        {"tools": [{"type": "web_search"}, TOOL | {"parameters": {"type": "x"}}], "tool_choice": "required"},
        "tools.1.parameters: ",
    ),
    ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, "input.0.summary.0.type: 'x' is not supported"),
    ({"tool_choice": {"type": "function", "name": "x"}, "tools": [TOOL]}, "tool_choice.name: 'x' must be the name"),
    ({"max_output_tokens": 0}, "max_output_tokens: 0 must be at least 1"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format: None must be given"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}}, "text.format.schema: "),
    ({"input": "a " * 40_000}, "input: "),
    ({"nonsense": 1}, "nonsense: 1 is not a field of this request"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_wrong_bodies_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with answered() as (client, _), pytest.raises(BadRequestError) as caught:
        ask(client, extra_body=fields)
    body: Any = caught.value.body
    assert body["message"].startswith(message), body
    assert body["param"] == message.partition(":")[0]


@pytest.mark.parametrize(
    ("given", "entries"),
    [
        ([USER] * 17_000, 17_000),
        ([{"type": "function_call_output", "call_id": "a", "output": [{}] * 17_000}], 17_001),
        ([{"type": "reasoning", "summary": [{}] * 17_000}], 17_001),
    ],
)
def test_too_many_parts_are_refused_as_such(given: Any, entries: int) -> None:
    with answered() as (client, _), pytest.raises(BadRequestError, match=f"input: .* has {entries} entries"):
        ask(client, input=given)


def test_what_clients_send_besides() -> None:
    """Advice is accepted, and what says something of the response is given back."""
    more: Any = {"stream_options": {"include_obfuscation": False}, "metadata": {"a": "b"}}
    with answered("Warm.") as (client, _):
        empty = ask(client, text={})
        verbose = ask(client, text={"verbosity": "low"}, **more)
        streamed = folded([*ask(client, stream=True, **more)])
    assert (empty.text.format.type, empty.metadata) == ("text", {})
    assert (verbose.text.format.type, verbose.text.verbosity) == ("text", "low")
    assert verbose.metadata == streamed["metadata"] == {"a": "b"}


class Failing(Answering):
    """Fails at once, or after its text."""

    def __init__(self, text: str, error: Exception) -> None:
        super().__init__("qwen", text, cut=0)
        self.error = error

    async def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        async for event in super().decode(request):
            if event.finish_reason:
                await asyncio.sleep(0.05)  # after the stream has begun
                raise self.error
            yield event


@pytest.mark.parametrize(
    ("text", "error", "code"),
    [
        ("", RuntimeError("a defect"), "server_error"),
        ("", OverloadedError("all places are taken"), "rate_limit_exceeded"),
        ("", ContextLengthError("messages", "9 tokens", "must fit"), "context_length_exceeded"),
        ("", InvalidValueError("input", 9, "must not"), "invalid_prompt"),
        ("<think>hm</think>Warm", RuntimeError("a defect"), "server_error"),
    ],
)
def test_a_stream_that_fails_is_a_response_that_failed(
    text: str, error: Exception, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "IDLE_S", 0.01)
    with TestClient(http_app(service_of("qwen", Failing(text, error))), raise_server_exceptions=False) as http:
        client = OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0)
        found = [event.to_dict() for event in ask(client, stream=True)]
    assert [event["sequence_number"] for event in found] == [*range(len(found))]
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    response = found[-1]["response"]
    assert (found[-1]["type"], response["status"], response["error"]["code"]) == ("response.failed", "failed", code)
    texts = [item["content"][0]["text"] for item in response["output"]]
    assert texts == (["hm", "Warm"] if text else [])
    assert [item["status"] for item in response["output"]] == (["completed", "incomplete"] if text else [])
