"""Chat completions over a pipeline that answers with given tokens in blocks cut anywhere, and over the real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel
from starlette.testclient import TestClient

from deploy import grpc_api
from deploy.chat.template import ChatTemplate
from deploy.errors import OverloadedError
from deploy.openai_api import chat
from deploy.openai_api.chat_requests import ChatRequest, Message
from deploy.openai_api.routes import http_app
from tests.answering import ANSWERS, ARGUMENTS, CALL, TOOLS, USER, Answering, demo, service_of
from tests.chat_models import tokenizer
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core.errors import DeadlineError, UnavailableError
from triforce_core.sampling.guides import Guide

TEXT = {"type": "text", "text": "a"}


def tool(name: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": parameters}}]


@contextmanager
def answered(family: str, text: str = "", *, cut: int = 0, length: bool = False) -> Iterator[tuple[OpenAI, Answering]]:
    pipelines = Answering(family, text, cut=cut, length=length)
    with TestClient(http_app(service_of(family, pipelines)), raise_server_exceptions=False) as http:
        yield OpenAI(base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0), pipelines


def prompt_of(family: str, pipelines: Answering) -> str:
    decoded: str = tokenizer(family).decode(list(pipelines.requests[-1].prompt_token_ids))
    return decoded


def ask(client: OpenAI, stream: bool = False, **fields: Any) -> Any:
    return client.chat.completions.create(**({"model": "demo", "messages": [USER]} | fields), stream=stream)


def joined(chunks: list[Any]) -> tuple[str, str, list[dict[str, str]], str]:
    """Content, reasoning, calls and finish reason of a stream with one choice."""
    content, reasoning, calls, reasons = "", "", [], []
    assert chunks[0].choices[0].delta.role == "assistant"
    for chunk in chunks:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasoning += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.id:
                assert call.index == len(calls)
                calls.append({"name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    return content, reasoning, calls, reasons[-1]


@pytest.mark.parametrize("family", ANSWERS)
@pytest.mark.parametrize("cut", range(12))
def test_calls_and_reasoning_are_the_same_however_the_blocks_were_cut(family: str, cut: int) -> None:
    reasoning = "I look.\n" if family == "qwen" else ""
    expected = ("", reasoning, [{"name": "weather", "arguments": ARGUMENTS}], "tool_calls")
    with answered(family, ANSWERS[family], cut=cut) as (client, _):
        assert joined(list(ask(client, stream=True, tools=TOOLS))) == expected
        choice = ask(client, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert getattr(choice.message, "reasoning_content", "") == reasoning
    [call] = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    assert len(call.id) == 9


@pytest.mark.parametrize("family", ANSWERS)
def test_a_call_goes_round(family: str) -> None:
    """The answer's own message is part of the next request, with what the tool said."""
    with answered(family, ANSWERS[family], cut=3) as (client, pipelines):
        message = ask(client, tools=TOOLS).choices[0].message
        assert "weather" in prompt_of(family, pipelines)
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3 °C"}
        ask(client, messages=[USER, message, result], tools=TOOLS)
        prompt = prompt_of(family, pipelines)
    assert ARGUMENTS in prompt
    assert prompt.index(ARGUMENTS) < prompt.index("3 °C")


def test_a_cut_call_goes_round() -> None:
    """A conversation goes on after an answer that ended within a call's arguments."""
    with answered("qwen", ANSWERS["qwen"][:-20], length=True) as (client, pipelines):
        answer = ask(client, tools=TOOLS).choices[0]
        [call] = answer.message.tool_calls
        assert answer.finish_reason == "length"
        assert call.function.arguments == ARGUMENTS[: len(call.function.arguments)] != ARGUMENTS
        result = {"role": "tool", "tool_call_id": call.id, "content": "not called"}
        ask(client, messages=[USER, answer.message, result], tools=TOOLS)
        assert json.dumps(call.function.arguments, ensure_ascii=False) in prompt_of("qwen", pipelines)


@pytest.mark.parametrize("stop", ["Łód", '"city"', '"</tool'])
def test_a_stop_string_within_a_call_is_why_it_ended(stop: str) -> None:
    kept = ARGUMENTS.partition(stop)[0]
    with answered("qwen", ANSWERS["qwen"], cut=6) as (client, _):
        whole = ask(client, tools=TOOLS, stop=stop).choices[0]
        streamed = joined(list(ask(client, stream=True, tools=TOOLS, stop=[stop])))
    assert (whole.message.tool_calls[0].function.arguments, whole.finish_reason) == (kept, "stop")
    assert (streamed[2], streamed[3]) == ([{"name": "weather", "arguments": kept}], "stop")


def test_a_stop_string_after_a_call_ends_an_answer_with_a_call() -> None:
    with answered("qwen", f"{ANSWERS['qwen']}\nDone. Or not.", cut=6) as (client, _):
        choice = ask(client, tools=TOOLS, stop=" Or").choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Done.", "tool_calls")
    assert choice.message.tool_calls[0].function.arguments == ARGUMENTS


class Place(BaseModel):
    city: str


def test_openai_s_client_parses_calls_and_schemas() -> None:
    tool = pydantic_function_tool(Place, name="weather")
    with answered("qwen", ANSWERS["qwen"], cut=1) as (client, _):
        parsed = client.chat.completions.parse(model="demo", messages=[USER], tools=[tool])  # type: ignore[list-item]
        [call] = parsed.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == Place(city="</tool_call> Łódź")
    with answered("none", '{"city": "Łódź"}') as (client, pipelines):
        answer = client.chat.completions.parse(model="demo", messages=[USER], response_format=Place)  # type: ignore[list-item]
        assert answer.choices[0].message.parsed == Place(city="Łódź")
        assert "city" in pipelines.requests[-1].grammar


def test_messages_that_openai_s_client_parsed_go_round() -> None:
    """They hold what was parsed, too, and the indices of streamed calls."""
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": [USER],
        "tools": [pydantic_function_tool(Place, name="weather")],
    }
    with answered("qwen", ANSWERS["qwen"], cut=1) as (client, pipelines):
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0].message
        for message in (client.chat.completions.parse(**asked).choices[0].message, streamed):
            [call] = message.tool_calls
            result = {"role": "tool", "tool_call_id": call.id, "content": "3 °C"}
            ask(client, messages=[USER, message, result], tools=TOOLS)
            prompt = prompt_of("qwen", pipelines)
            assert prompt.index(ARGUMENTS) < prompt.index("3 °C")
    with answered("none", '{"city": "Łódź"}') as (client, pipelines):
        parsed = client.chat.completions.parse(model="demo", messages=[USER], response_format=Place)  # type: ignore[list-item]
        ask(client, messages=[USER, parsed.choices[0].message, USER])
        assert 'assistant: {"city": "Łódź"}\n' in prompt_of("none", pipelines)


def test_hints_about_caches_are_ignored() -> None:
    hints = {"prompt_cache_key": "a", "prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}}
    with answered("none", "a") as (client, _):
        assert ask(client, messages=[USER], **hints).choices[0].message.content == "a"


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The conversations whose rendering has begun. Rendering takes half a second here, longer than the tests wait."""
    begun: list[Any] = []

    async def render(self: ChatTemplate, messages: Any, *_: Any, **__: Any) -> tuple[int, ...]:
        begun.append(messages)
        await asyncio.sleep(0.5)
        return (1,)

    monkeypatch.setattr(ChatTemplate, "render", render)
    return begun


def test_a_chat_is_rendered_in_its_places_and_within_its_deadline(rendered: list[Any]) -> None:
    service = service_of("none", Answering("none", "a", cut=0))

    def status() -> int:
        body = {"messages": [USER], "timeout_s": 0.05}
        return TestClient(http_app(service)).post("/v1/chat/completions", json=body).status_code

    assert status() == 504
    assert len(rendered) == 1
    service.in_flight = service.room
    assert status() == 429
    service.draining = True
    assert status() == 503
    assert len(rendered) == 1


def test_a_chat_over_grpc_is_rendered_in_its_places_and_within_its_deadline(rendered: list[Any]) -> None:
    service = service_of("none", Answering("none", "a", cut=0))

    def ask() -> None:
        request = gen.GenerateRequest(messages=gen.ChatMessages(messages=[gen.ChatMessage(**USER)]), timeout_s=0.05)
        asyncio.run(grpc_api.generate(service, request))

    with pytest.raises(DeadlineError):
        ask()
    assert len(rendered) == 1
    service.in_flight = service.room
    with pytest.raises(OverloadedError):
        ask()
    service.draining = True
    with pytest.raises(UnavailableError):
        ask()
    assert len(rendered) == 1


def test_a_stream_keeps_nothing_of_what_it_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[chat.Choice] = []

    class Seen(chat.Choice):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(chat, "Choice", Seen)
    asked = {"logprobs": True, "tools": TOOLS, "extra_body": {"return_token_ids": True}}
    with answered("qwen", f"{ANSWERS['qwen']}\nso") as (client, _):
        assert joined(list(ask(client, stream=True, **asked)))[2]
        assert ask(client, **asked).choices[0].token_ids
    streamed, whole = [
        [each.logprobs, each.content, each.reasoning, *each.arguments, *each.tokens.values()] for each in made
    ]
    assert not any(streamed)
    assert all(whole)


def test_no_grammar_is_made_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop, plain = [], Guide.grammar

    def grammar(guide: Guide) -> str:
        try:
            asyncio.get_running_loop()
            on_loop.append(guide.name)
        except RuntimeError:
            pass
        return plain(guide)

    monkeypatch.setattr(Guide, "grammar", grammar)
    with answered("qwen", '<think>hm</think>{"a": 1}') as (client, pipelines):
        ask(client, response_format={"type": "json_object"})
        ask(client, tools=TOOLS, tool_choice="required")
    assert [bool(request.grammar) for request in pipelines.requests] == [True, True]
    assert on_loop == []


def test_the_document_names_the_fields_and_the_form_of_streams() -> None:
    unused: Any = None  # the routes are described without a service behind them
    document = http_app(unused).openapi()
    for path in ("/v1/completions", "/v1/chat/completions"):
        answer = document["paths"][path]["post"]["responses"]["200"]
        # OpenAPI 3.1 has no words for events: a schema would be one of the whole stream.
        assert answer["content"] == {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
        assert "server-sent events" in answer["description"]
    for model in (ChatRequest, Message):
        assert document["components"]["schemas"][model.__name__]["properties"].keys() == model.model_fields.keys()


@pytest.mark.parametrize("family", ["qwen", "llama", "none"])
def test_a_plain_answer_is_content(family: str) -> None:
    text = "It is <b>3 °C</b>. {\n"
    tools = {} if family == "none" else {"tools": TOOLS}
    with answered(family, text, cut=5) as (client, _):
        assert joined(list(ask(client, stream=True, **tools))) == (text, "", [], "stop")
        assert ask(client, **tools).choices[0].message.content == text


def test_a_call_cut_off_by_its_length_is_told_as_far_as_it_came() -> None:
    with answered("qwen", ANSWERS["qwen"][:-25], length=True) as (client, _):
        _, _, [call], reason = joined(list(ask(client, stream=True, tools=TOOLS)))
    assert reason == "length"
    assert ARGUMENTS.startswith(call["arguments"])
    assert call["arguments"]


def test_without_tools_or_with_none_chosen_nothing_is_taken_for_a_call() -> None:
    text = "<tool_call>\n" + CALL["qwen"] + "\n</tool_call>"
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        with answered("qwen", text) as (client, pipelines):
            assert ask(client, **fields).choices[0].message.content == text
            assert "You have tools" not in prompt_of("qwen", pipelines)


def test_one_call_at_most_where_calls_are_not_to_be_parallel() -> None:
    two = f"<tool_call>{CALL['qwen']}</tool_call>\n" * 2
    with answered("qwen", two, cut=2) as (client, _):
        assert len(ask(client, tools=TOOLS).choices[0].message.tool_calls) == 2
        assert len(ask(client, tools=TOOLS, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
        assert len(joined(list(ask(client, True, tools=TOOLS, parallel_tool_calls=False)))[2]) == 1


def test_reasoning_that_the_template_began_is_split_off() -> None:
    with answered("qwen", "hm\n</think>\n\nyes", cut=4) as (client, _):
        fields = {"extra_body": {"chat_template_kwargs": {"thinking": True}}}
        assert joined(list(ask(client, stream=True, **fields))) == ("yes", "hm\n", [], "stop")


def test_logprobs_are_told_for_every_token() -> None:
    with answered("none", "żó", cut=1) as (client, pipelines):
        whole = ask(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        chunks = list(ask(client, stream=True, logprobs=True, top_logprobs=2))
        assert pipelines.requests[-1].logprobs == 2
        assert ask(client).choices[0].logprobs is None
    assert b"".join(bytes(entry.bytes) for entry in whole) == "żó".encode()
    assert [len(entry.top_logprobs) for entry in whole] == [2] * 4
    assert whole[0].top_logprobs[0].bytes == whole[0].bytes
    assert whole[0].logprob == -0.5
    streamed = [entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert streamed == whole


def test_several_choices_have_indices_and_one_usage() -> None:
    with answered("none", "abc") as (client, _):
        whole = ask(client, n=3)
        chunks = list(ask(client, stream=True, n=3, stream_options={"include_usage": True}))
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.message.content for choice in whole.choices] == ["abc"] * 3
    assert whole.usage.completion_tokens == 9
    assert chunks[-1].usage == whole.usage
    for index in range(3):
        ours = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert "".join(choice.delta.content or "" for choice in ours) == "abc"
        assert (ours[0].delta.role, ours[-1].finish_reason) == ("assistant", "stop")


def test_token_ids_and_extras_come_where_asked_for() -> None:
    with answered("none", "abc", cut=7) as (client, pipelines):
        choice = ask(client, extra_body={"return_token_ids": True}).choices[0]
        chunks = list(ask(client, stream=True, extra_body={"return_token_ids": True}))
    assert choice.token_ids == pipelines.ids
    assert choice.origins == ["draft"] * 3
    assert choice.texts == ["a", "b", "c"]
    told = [chunk for chunk in chunks if getattr(chunk.choices[0], "token_ids", None)]
    assert [text for chunk in told for text in chunk.choices[0].texts] == choice.texts
    assert all("acceptance" in chunk.triforce for chunk in told)
    assert [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", [])] == pipelines.ids
    assert chunks[0].triforce["seed"] >= 0
    assert "acceptance" in chunks[-1].triforce


@pytest.mark.parametrize("family", ANSWERS)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_has_a_grammar_that_allows_it_and_no_other_text(family: str, choice: Any) -> None:
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    with answered(family, ANSWERS[family]) as (client, pipelines):
        other = {"type": "function", "function": {"name": "other"}}
        ask(client, tools=[*TOOLS, other], tool_choice=choice)
        grammar = pipelines.requests[-1].grammar
    vocabulary = from_tokenizer(tokenizer(family))

    def allows(text: str) -> bool:
        tokens = tokenizer(family).encode(text, add_special_tokens=False)
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    answer = ANSWERS[family].replace("[TOOL_CALLS] [", "[TOOL_CALLS][").replace("</tool_call> Łódź", "Łódź")
    assert allows(answer)
    assert not allows(answer.replace("weather", "unknown"))
    assert not allows(answer.replace('"city": ', '"town": '))
    assert allows(answer.replace("weather", "other")) == (choice == "required")
    assert not allows("It is warm.")
    if family == "qwen":
        assert allows(answer.partition("</think>\n\n")[2])
        assert allows(answer.replace("</think>\n\n", "</think>\n"))
        assert allows(f"{answer}\n{answer.partition(chr(10) * 2)[2]}") == (choice == "required")


def test_a_reasoning_model_reasons_before_the_form_that_was_asked_for() -> None:
    with answered("qwen", '<think>hm</think>{"a": 1}') as (client, pipelines):
        message = ask(client, response_format={"type": "json_object"}).choices[0].message
        assert "thought" in pipelines.requests[-1].grammar
    assert (message.content, message.reasoning_content) == ('{"a": 1}', "hm")


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "[0-9]+ .C"},
        {"guided_choice": ["3 °C", "cold"]},
        {"guided_grammar": 'start: NUMBER " °C"\nNUMBER: /[0-9]+/'},
        {"structured_outputs": {"grammar": 'root ::= [0-9]+ " °C"'}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_reasoning_model_reasons_before_whatever_was_asked_for(fields: dict[str, Any]) -> None:
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    with answered("qwen", "<think>hm</think>3 °C") as (client, pipelines):
        message = ask(client, extra_body=fields).choices[0].message
        matcher = LLMatcher(from_tokenizer(tokenizer("qwen")), pipelines.requests[-1].grammar, log_level=0)
    assert (message.content, message.reasoning_content) == ("3 °C", "hm")
    assert matcher.try_consume_tokens(pipelines.ids) == len(pipelines.ids)
    assert matcher.is_accepting()


def test_how_much_to_reason_reaches_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    template = tokenizer("qwen").chat_template
    for word, said in (("reasoning_effort", "low"), ("enable_thinking", "True"), ("other", None)):
        monkeypatch.setattr(tokenizer("qwen"), "chat_template", f"{template}[{{{{ {word} }}}}]")
        with answered("qwen", "a") as (client, pipelines):
            if said is None:
                with pytest.raises(BadRequestError, match="reasoning_effort: 'low' is not supported"):
                    ask(client, reasoning_effort="low")
            else:
                ask(client, reasoning_effort="low")
                assert prompt_of("qwen", pipelines).endswith(f"[{said}]")
                ask(client, reasoning_effort="low", extra_body={"chat_template_kwargs": {word: "x"}})
                assert prompt_of("qwen", pipelines).endswith("[x]")


def test_a_conversation_may_hold_what_other_servers_and_clients_put_into_it() -> None:
    """The prompt is that of the bare messages."""
    extras: dict[str, Any] = {"id": "1", "cache_control": {"type": "ephemeral"}, "refusal": None, "prefix": False}
    extras |= {"audio": None, "annotations": [{}], "function_call": None, "provider_specific_fields": {}, "parsed": {}}
    request = {"reasoning_effort": None, "functions": [], "use_beam_search": False, "metadata": {"a": 1}, "echo": False}
    request |= {"store": False, "logprobs": False, "best_of": 1, "top_k": -1, "user": "me", "modalities": ["text"]}
    with answered("qwen", "a") as (client, pipelines):
        bare = [{"role": "user", "content": [TEXT]}, {"role": "assistant", "content": "x"}, USER]
        ask(client, messages=bare)
        bare[0]["content"] = [TEXT | {"cache_control": {"type": "ephemeral"}}]
        ask(client, messages=[each | extras for each in bare], extra_body=request)
        ask(client, messages=bare, tools=[TOOLS[0] | {"cache_control": {"type": "ephemeral"}}])
    assert pipelines.requests[0].prompt_token_ids == pipelines.requests[1].prompt_token_ids
    assert len(pipelines.requests) == 3


def test_each_chunk_of_an_answer_tells_the_usage_so_far() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with answered("qwen", "one two three four", cut=1) as (client, _):
        *chunks, last = ask(client, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert len({*counts}) > 1
    assert {chunk.usage.prompt_tokens for chunk in (*chunks, last)} == {last.usage.prompt_tokens}
    assert counts[-1] == last.usage.completion_tokens
    assert not last.choices


def test_tools_are_refused_for_a_model_without_a_form_of_them() -> None:
    with answered("none") as (client, _), pytest.raises(BadRequestError, match=r"tools: .* are not supported"):
        ask(client, tools=TOOLS)


def test_the_output_is_bounded_by_the_context_or_by_either_name() -> None:
    with answered("none", "a") as (client, pipelines):
        ask(client)
        prompt = len(pipelines.requests[0].prompt_token_ids)
        assert pipelines.requests[0].max_tokens == demo().limits.longest_output(prompt)
        ask(client, max_tokens=7)
        ask(client, max_completion_tokens=8, max_tokens=8)
    assert [request.max_tokens for request in pipelines.requests[1:]] == [7, 8]
