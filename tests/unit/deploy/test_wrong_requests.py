"""Wrong requests: one table of what is sent, the field that is blamed and a part of the rule, through every door."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from starlette.testclient import TestClient

from deploy import grpc_api
from deploy.bounded_json import MOST
from deploy.grpc_errors import status_of
from deploy.openai_api.routes import http_app
from deploy.service import Service
from tests.answering import TOOLS, USER, Answering, service_of
from tests.scripted import ENDED, ids, served
from tests.unit.deploy.test_chat import TEXT, tool
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1.generation_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server
from triforce_core.client import CallError, TriForceClient

Row = tuple[dict[str, Any], str, str]  # what is sent, the field that is blamed, a part of the rule

HUGE = 10**400  # no double is as large
LETTERS, SURROGATE = "x" * 5_000_000, "\ud800"
NOTHING = {"type": "nothing"}
REQUIRED: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
USERS = gen.ChatMessage(role="user", content="a")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


def conversation(*messages: gen.ChatMessage, **fields: Any) -> dict[str, Any]:
    return {"messages": gen.ChatMessages(messages=messages or [USERS], **fields)}


# By the doors that refuse it. Fields have the names that they have in the SDK; `HTTP_NAMES` has their names over HTTP.
TABLE: dict[str, list[Row]] = {
    "completions chat sdk": [
        ({"model": "gpt-5"}, "model", "'gpt-5' is not served here; 'demo' is"),
        ({"max_tokens": 0}, "max_tokens", "0 must be at least 1"),
        ({"temperature": -0.1}, "temperature", "-0.1 must be between 0 and 100"),
        ({"temperature": math.nan}, "temperature", "nan must be between 0 and 100"),
        ({"temperature": 100.5}, "temperature", "100.5 must be between 0 and 100"),
        ({"temperature": "hot"}, "temperature", "'hot' is "),
        ({"top_p": -0.1}, "top_p", "-0.1 must be above 0"),
        ({"top_p": 1.01}, "top_p", "1.01 must be above 0 and at most 1"),
        ({"top_k": 2**31}, "top_k", "2147483648 must be 0 (off) or more, and below 2**31"),
        ({"top_k": 1.5}, "top_k", "1.5 is "),
        ({"min_p": 2}, "min_p", "must be between 0 and 1"),
        ({"min_p": -0.1}, "min_p", "must be between 0 and 1"),
        ({"seed": 2**63}, "seed", "must be at least -2**63 and below 2**63"),
        ({"seed": -(2**63) - 1}, "seed", "must be at least -2**63 and below 2**63"),
        ({"stop": [""]}, "stop", "'' must not hold an empty string"),
        ({"stop": ["a", "b" * 1025]}, "stop", "1025 must be at most 1024 characters in each string"),
        ({"stop": ["a"] * 17}, "stop", "17 entries"),
        ({"stop": [1]}, "stop", "[1] is "),
        ({"bad_words": [""]}, "bad_words", ""),
        ({"bad_words": ["a"] * 129}, "bad_words", "129 entries"),
        ({"bad_words": ["a" * 1025]}, "bad_words", "1025 must be at most 1024 characters each"),
        ({"stop_token_ids": [5000]}, "stop_token_ids", "5000 is not a token id"),
        ({"stop_token_ids": [5] * 257}, "stop_token_ids", "257 entries"),
        ({"lookaheads": []}, "lookaheads", "must be two numbers"),
        ({"lookaheads": [8]}, "lookaheads", "must be two numbers"),
        ({"lookaheads": [8, 65]}, "lookaheads", "must each be at least 0 and at most 64"),
        ({"drafter": "human"}, "drafter", "'human' must be one of model, lookup, both"),
        ({"selector": "best"}, "selector", "'best' must be one of mean_key, snapkv, h2o, streaming"),
        ({"selector": "quest"}, "selector", "was removed: use snapkv"),
        ({"timeout_s": 0}, "timeout_s", "must be above 0"),
        ({"timeout_s": -0.5}, "timeout_s", "-0.5 must be above 0"),
        ({"timeout_s": math.nan}, "timeout_s", "nan must be above 0"),
        ({"timeout_s": math.inf}, "timeout_s", "inf must be above 0"),
        ({"timeout_s": HUGE}, "timeout_s", ""),
        ({"timeout_s": "5"}, "timeout_s", "'5' is "),
        ({"priority": 101}, "priority", "101 must be at least -100 and at most 100"),
        ({"priority": -101}, "priority", "-101 must be at least -100 and at most 100"),
        ({"priority": 2**31 - 1}, "priority", "2147483647 must be at least -100 and at most 100"),
        ({"priority": HUGE}, "priority", ""),
        ({"n": 0}, "n", "0 must be at least 1"),
        ({"n": 1000}, "n", "1000 must be at least 1 and at most "),
        ({"n": 4_000_000_000}, "n", "4000000000 must be at least 1 and at most "),
        ({"logit_bias": {4096: 1.0}}, "logit_bias", "4096 is not a token id: must be at least 0 and below 4096"),
        ({"logit_bias": {5: 101.0}}, "logit_bias", "'5: 101.0' must be between -100 and 100"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias", "1025 entries"),
        ({"presence_penalty": 2.5}, "presence_penalty", "2.5 must be between -2 and 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "-3.0 must be between -2 and 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "0.0 must be at least 0.01 and at most 100"),
        ({"min_tokens": 20, "max_tokens": 5}, "min_tokens", "20 must be at most max_tokens, 5"),
        ({"cache_salt": "s" * 129}, "cache_salt", "'129 characters' must be at most 128 characters"),
        ({"cache_salt": SURROGATE}, "cache_salt", r"\ud800' "),
        ({"json_schema": '{"type": "nothing"}'}, "json_schema", "cannot be compiled"),
        ({"json_schema": "[]"}, "json_schema", "'[]' cannot be read: is not an object"),
        ({"json_schema": nested(600)}, "json_schema", "cannot be "),
        ({"regex": "(["}, "regex", "'([' cannot be compiled"),
        ({"regex": SURROGATE}, "regex", r"\ud800' "),
        ({"choice": []}, "choice", "0 must be 1 to 1024 texts"),
        ({"choice": ["a"] * 1025}, "choice", "1025 entries"),
        ({"grammar": "start: nothing"}, "grammar", "'start: nothing' cannot be compiled"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos", "True contradicts "),
        ({"regex": "a", "choice": ["a"]}, "choice", "contradicts "),
    ],
    "completions sdk": [
        ({"prompt": ""}, "prompt", "'' must not be empty"),
        ({"prompt": []}, "prompt", "must hold at least one token"),
        ({"prompt": SURROGATE}, "prompt", r"\ud800' "),
        ({"prompt": [5, 4096]}, "prompt", "4096 is not a token id: must be at least 0 and below 4096"),
        ({"prompt": [2**32]}, "prompt", ""),
        ({"prompt": LETTERS}, "prompt", "'5000000 characters' cannot fit the context of 16384 tokens"),
        ({"prompt": "x" * 100_000}, "prompt", "must fit the context of 16384 tokens"),
        ({"prompt": [1] * 16384, "max_tokens": 1}, "prompt", "16384 prompt + 1 output tokens"),
        ({"max_tokens": 100_000}, "prompt", "100000 output tokens"),
        ({"logprobs": 21}, "logprobs", "21 must be between 0 and 20"),
        ({"prompt_logprobs": 99}, "prompt_logprobs", "99 must be between 0 and 20"),
        ({"n": 2, "resume_token_ids": [5]}, "resume_token_ids", "'with n: 2' continue one completion"),
    ],
    "completions chat": [
        *[
            ({name: HUGE}, name, "")
            for name in ("top_k", "seed", "temperature", "top_p", "min_p", "n", "presence_penalty")
        ],
        ({"lookaheads": [HUGE, 0]}, "lookaheads", ""),
        ({"lookaheads": [-1, 3]}, "lookaheads", "must each be at least 0"),
        ({"top_k": -2}, "top_k", "-2 must be 0 (off) or more"),
        ({"max_tokens": -5}, "max_tokens", "-5 must be at least 1"),
        ({"max_tokens": "16"}, "max_tokens", "'16' is refused: Input should be a valid integer"),
        ({"max_tokens": 1.5}, "max_tokens", "1.5 is refused: Input should be a valid integer"),
        ({"temperature": True}, "temperature", "True is refused"),
        ({"priority": 0.5}, "priority", "0.5 is refused: Input should be a valid integer"),
        ({"priority": True}, "priority", "True is refused"),
        ({"stop": ""}, "stop", "must not hold an empty string"),
        ({"cache_salt": 5}, "cache_salt", "5 is refused"),
        ({"bad_words": [SURROGATE]}, "bad_words", "lone surrogates"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "is not a token id"),
        ({"stream": "yes"}, "stream", "'yes' is refused"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options", "needs stream: true"),
        ({"stream_options": {"nonsense": 1}}, "stream_options.nonsense", "is not a field of this request"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "is not supported",
        ),
        ({"speculation": {"tiers": "draft"}}, "speculation.tiers", "'draft' is refused"),
        ({"logit_bias": {"five": 1.0}}, "logit_bias", "'five' is not a token id"),
        ({"logit_bias": {"5" * 5000: 1.0}}, "logit_bias", "is not a token id"),
        ({"return_token_ids": None}, "return_token_ids", "None is refused"),
        ({"json_schema": NOTHING}, "json_schema", "cannot be compiled"),
        ({"json_schema": {"const": SURROGATE}}, "json_schema", "cannot be"),
        ({"json_schema": 5}, "json_schema", "must be a JSON schema"),
        ({"choice": [SURROGATE]}, "choice", "cannot be"),
        ({"grammar": SURROGATE}, "grammar", "cannot be"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs.grammar", "contradicts"),
        ({"structured_outputs": {}}, "structured_outputs", "must hold one of"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "is not a field of this request"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be given with"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "is refused"),
        ({"nonsense": 1}, "nonsense", "1 is not a field of this request"),
    ],
    "completions": [
        ({"prompt": [-1]}, "prompt", "-1 is not a token id"),
        ({"n": 9}, "n", "9 must be at least 1 and at most 8"),
        ({"prompt": ["a", "b"], "n": 5}, "prompt", "'2 prompts' must need at most 8 places"),
        ({"prompt": ["a"] * 5, "n": 2}, "prompt", "must need at most 8 places, one for each prompt and each of its n"),
        ({"prompt": 5}, "prompt", "must be a text or a list of token ids"),
        ({"prompt": None}, "prompt", "must be a text or a list of token ids"),
        ({"prompt": ["a", 5]}, "prompt", "all of one kind: prompt.1 is not"),
        ({"prompt": [[5], [5], [5, "a"]]}, "prompt", "all of one kind: prompt.2 is not"),
        ({"prompt": [5, 5, 5, None]}, "prompt", "all of one kind: prompt.3 is not"),
        ({"prompt": [None]}, "prompt", "all of one kind: prompt.0 is not"),
        ({"prompt": [[5], "a"]}, "prompt", "all of one kind: prompt.1 is not"),
        ({"prompt": [5, True]}, "prompt", "all of one kind: prompt.1 is not"),
        ({"prompt": [HUGE]}, "prompt", ""),
        ({"prompt": ["a", ""]}, "prompt.1", "must not be empty"),
        ({"prompt": [[5], [7], [10**6]]}, "prompt.2", "is not a token id"),
        ({"prompt": [""]}, "prompt", "must not be empty"),
        ({"prompt": ["a", "a " * 20_000]}, "prompt.1", "must fit the context"),
        ({"prompt": ["a", "b"], "min_tokens": -1}, "min_tokens", ""),
        ({"prompt": ["a", "b"], "resume_token_ids": [5]}, "resume_token_ids", "'2 prompts' cannot be resumed together"),
        ({"max_tokens": 2**32}, "prompt", ""),
        ({"max_tokens": HUGE}, "prompt", ""),
        ({"max_tokens": -1, "echo": True}, "max_tokens", "-1 must be at least 1"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0 must be at least 1"),
        ({"logprobs": HUGE}, "logprobs", ""),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "must be between 0 and 20"),
        ({"best_of": 2}, "best_of", "2 is not supported: leave it out or set it to 1"),
        ({"suffix": "x"}, "suffix", "is not supported"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "is not supported"),
        ({"detokenize": False}, "detokenize", "is not supported"),
    ],
    "chat": [
        ({"messages": []}, "messages", "[] must hold at least one message"),
        ({"messages": [USER | {"content": "a" * 20_000}]}, "messages", "must fit the context"),
        ({"messages": [USER | {"content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "is not supported"),
        ({"messages": [USER | {"content": [TEXT | {"prefix": True}]}]}, "messages.0.content.0.prefix", "True is not"),
        ({"messages": [USER | {"content": [TEXT | {"x": 1}]}]}, "messages.0.content.0.x", "1 is not a field"),
        ({"messages": [USER | {"prefix": True}]}, "messages.0.prefix", "True is not supported: leave it out"),
        ({"messages": [USER | {"mood": "x"}]}, "messages.0.mood", "'x' is not a field"),
        ({"messages": [USER, {"role": "tool", "content": "a"}]}, "messages.1.tool_call_id", "None must be given in"),
        ({"messages": [USER | {"tool_call_id": "1"}]}, "messages.0.tool_call_id", "'1' must be given in messages of"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "1 contradicts max_completion_tokens 2"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "0 must be at least 1"),
        ({"max_tokens": 100_000}, "messages", "100000 output tokens"),
        ({"top_logprobs": 2}, "top_logprobs", "2 needs logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21 must be between 0 and 20"),
        ({"tool_choice": "required"}, "tool_choice", "'required' needs tools"),
        ({"tool_choice": "auto"}, "tool_choice", "'auto' needs tools"),
        ({"tools": TOOLS * 2}, "tools", "['weather', 'weather'] must have different names"),
        ({"tools": tool("a b\n", {})}, "tools.0.function.name", r"'a b\n' must be 1 to 128 letters"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "'sometimes' is refused: must be none, auto"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
            "must be the name of one",
        ),
        (REQUIRED | {"guided_regex": "a"}, "tool_choice", "contradicts guided_regex"),
        (REQUIRED | {"stop": "\n"}, "stop", r"'\n' contradicts tool_choice"),
        (REQUIRED | {"tools": tool("f", NOTHING)}, "tools.0.function.parameters", "must be of type object"),
        (
            {"tools": TOOLS + tool("f", NOTHING), "response_format": {"type": "json_object"}},
            "tools.1.function.parameters",
            "must be of type object",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": NOTHING}}},
            "response_format.json_schema.schema",
            """'{"type": "nothing"}' cannot be compiled""",
        ),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "True contradicts add_generation_prompt",
        ),
        ({"audio": {"voice": "x"}}, "audio", "is not supported"),
        ({"modalities": ["audio"]}, "modalities", "is not supported"),
        ({"prediction": {}}, "prediction", "is not supported"),
        ({"web_search_options": {}}, "web_search_options", "is not supported"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "is not supported"),
        ({"store": True}, "store", "is not supported"),
        ({"models": ["a", "b"]}, "models", "is not supported: leave it out or set it to []; one model"),
        ({"lora_request": {"name": "a"}}, "lora_request", "leave it out or set it to null; merge the adapter"),
        (
            {"reasoning_effort": "high"},
            "reasoning_effort",
            "'high' is not supported: the model's chat template knows neith",
        ),
        ({"reasoning_effort": "most"}, "reasoning_effort", "must be none, minimal, low, medium, high or xhigh"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "leave it out or set it to null; use /v1/comp"),
    ],
    "sdk": [  # what the client itself refuses, because it cannot be sent
        ({"prompt": [1, -1]}, "prompt", ""),
        ({"prompt": ["a"]}, "prompt", ""),
        ({"prompt": "x" * (64 << 20)}, "prompt", "bytes must be at most 64 MiB"),
        ({"seed": 1.0}, "seed", "1.0 is of the wrong type"),
        ({"resume_token_ids": [-1]}, "resume_token_ids", ""),
        ({"max_tokens": -1}, "max_tokens", ""),
        ({"lookaheads": (8, -3)}, "lookaheads", ""),
        ({"priority": 2**31}, "priority", "2147483648 is of the wrong type or out of range"),
        ({"timeout_s": -1.5}, "timeout_s", "must be above 0 and below 1e9"),
        ({"timeout_s": 1e300}, "timeout_s", "must be above 0 and below 1e9"),
        *[({"bad_word_ids": words}, "bad_word_ids", "") for words in (5, [1, 2], [["a"]])],
        ({"bad_word_ids": [[5]] * 257}, "bad_word_ids", "257 entries"),
        ({"top_p": 0}, "top_p", "0.0 must be above 0"),  # over HTTP it is greedy, as in OpenAI's API
    ],
    "grpc": [  # what other clients than the SDK may send
        ({}, "prompt", "None must be a text, token ids or messages"),
        *[
            ({"text": "def", "timeout_s": each}, "timeout_s", f"{each} must be above 0 and finite")
            for each in (0.0, -1.0, math.nan, math.inf)
        ],
        (
            {"text": "def", "sampling": gen.Sampling(top_k=2**32 - 1)},
            "top_k",
            f"{2**32 - 1} must be 0 (off) or more, and below 2**31",
        ),
        ({"text": "def", "resume_token_ids": [5] * 16_385}, "resume_token_ids", "'16385 entries' must be at most"),
        ({"token_ids": gen.TokenIds(values=[5] * 16_385)}, "prompt", "'16385 tokens' must fit the context of 16384"),
        (conversation(*[USERS] * 16_385), "messages", "'16385 messages' must be at most 16384"),
        (conversation(tools_json=json.dumps([{}] * 129)), "tools_json", "'129 objects' must be at most 128"),
        (
            conversation(tools_json="[" * 200_000),
            "tools_json",
            f"'200000 objects, lists and fields' must be at most {MOST}",
        ),
    ],
    "tokenize": [
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"prompt": SURROGATE}, "prompt", "lone surrogates"),
        ({"prompt": "a", "model": "other"}, "model", "'other' is not served here"),
        ({"prompt": 5}, "prompt", ""),
        ({"prompt": "a", "more": 1}, "more", "1 is not a field of this request"),
    ],
    "detokenize": [
        ({"tokens": [-1]}, "tokens", "-1 is not a token id"),
        ({"tokens": [HUGE]}, "tokens", ""),
        ({"tokens": [5] * 20_000}, "tokens", ""),
        ({}, "tokens", "is required"),
    ],
}
HTTP_NAMES = {name: f"speculation.{name}" for name in ("lookaheads", "drafter", "selector")}
HTTP_NAMES |= {"json_schema": "guided_json", **{name: f"guided_{name}" for name in ("regex", "choice", "grammar")}}

SCRIPTED, SERVICE, PIPELINES = served(ENDED, max_sequences=4, server={"max_queued": 4})
CHATTING = Answering("qwen", "", cut=0)
CHATS = TestClient(http_app(service_of("qwen", CHATTING)), raise_server_exceptions=False)


def over_http(fields: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    for name, value in fields.items():
        outer, _, inner = HTTP_NAMES.get(name, name).partition(".")
        body[outer] = {inner: value} if inner else value
    return body


def check_http(client: TestClient, path: str, fields: dict[str, Any], param: str, rule: str) -> None:
    """The answer has OpenAI's form, whether a stream was asked for or not."""
    for stream in [{"stream": False}, {"stream": True}] if path.startswith("/v1/") else [{}]:
        content = json.dumps({**stream, **over_http(fields)})
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == (404 if param == "model" else 400), answer.text
        error = answer.json()["error"]
        assert error["param"] == HTTP_NAMES.get(param, param)
        assert error["message"].startswith(f"{error['param']}: ")
        assert rule in error["message"]
        assert len(error["message"]) < 400
        assert error["type"] == "invalid_request_error"
        assert (
            error["code"] == "context_length_exceeded" if "fit the context" in rule else isinstance(error["code"], str)
        )


class ApiServicer(GenerationServicer):
    """The gRPC API behind a server of gRPC's own, without Ray's proxy."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def Generate(self, request: gen.GenerateRequest, context: grpc.ServicerContext) -> gen.GenerateResponse:
        try:
            return asyncio.run(grpc_api.generate(self.service, request))
        except Exception as error:
            context.abort(*status_of(error))
            raise

    def GenerateStream(self, request: gen.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        self.Generate(request, context)
        yield gen.GenerateChunk()


@pytest.fixture(scope="module")
def sdk() -> Iterator[TriForceClient]:
    server = grpc.server(ThreadPoolExecutor(max_workers=2), options=[("grpc.max_receive_message_length", 65 << 20)])
    add_GenerationServicer_to_server(ApiServicer(SERVICE), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with TriForceClient(f"127.0.0.1:{port}", timeout_s=60, retries=0) as client:
        yield client
    server.stop(grace=None).wait()


def check_sdk(client: TriForceClient, fields: dict[str, Any], param: str, rule: str) -> None:
    calls: list[Callable[..., Any]] = [client.generate, lambda *args, **named: list(client.stream(*args, **named))]
    for call in calls:
        with pytest.raises(CallError) as refused:
            call(**{"prompt": "def", "max_tokens": 4, **fields})
        expected = grpc.StatusCode.NOT_FOUND if param == "model" else grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.code is expected, refused.value
        assert str(refused.value).startswith(f"{param}: ")
        assert rule in str(refused.value)


def check_grpc(fields: dict[str, Any], param: str, rule: str) -> None:
    with pytest.raises(Exception, match=rf"^{param}: ") as refused:
        asyncio.run(grpc_api.generate(SERVICE, gen.GenerateRequest(**fields)))
    assert status_of(refused.value)[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert rule in str(refused.value)


CASES = [(door, *row) for doors, rows in TABLE.items() for row in rows for door in doors.split()]


@pytest.mark.parametrize(
    ("door", "fields", "param", "rule"), CASES, ids=[f"{door}-{str(fields)[:40]}" for door, fields, *_ in CASES]
)
def test_what_is_wrong_is_named(sdk: TriForceClient, door: str, fields: dict[str, Any], param: str, rule: str) -> None:
    """By its field, with the value and the rule; and nothing reaches the pipeline."""
    PIPELINES.requests.clear()
    CHATTING.requests.clear()
    if door == "sdk":
        check_sdk(sdk, fields, param, rule)
    elif door == "grpc":
        check_grpc(fields, param, rule)
    elif door == "chat":
        check_http(CHATS, "/v1/chat/completions", {"messages": [USER], **fields}, param, rule)
    elif door == "completions":
        check_http(SCRIPTED, "/v1/completions", {"prompt": "def", **fields}, param, rule)
    else:
        check_http(SCRIPTED, f"/{door}", fields, param, rule)
    assert not PIPELINES.requests + CHATTING.requests
    assert SERVICE.in_flight == 0


WITHIN: list[dict[str, Any]] = [
    {"temperature": 100.0, "top_k": 2**31 - 1, "min_p": 1.0, "top_p": 1.0, "seed": 2**63 - 1, "priority": 100},
    {"temperature": 0, "seed": -(2**63), "priority": -100, "timeout_s": 999_999_999, "min_tokens": 4, "max_tokens": 4},
    {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.01, "logit_bias": {4095: -100.0}},
    {"stop": ["a" * 1024] * 16, "bad_words": ["a"] * 128, "stop_token_ids": [4095] * 256, "n": 8},
    {"lookaheads": [64, 0], "cache_salt": "ä" * 128},
    {"prompt": [4095] * 16_383, "max_tokens": 1, "repetition_penalty": 100.0},
]


@pytest.mark.parametrize("fields", WITHIN, ids=lambda fields: str(fields)[:40])
def test_what_lies_just_within_the_rules_is_answered(sdk: TriForceClient, fields: dict[str, Any]) -> None:
    sent = {"prompt": "def", **fields}
    assert sdk.generate(**sent).choices
    answer = SCRIPTED.post("/v1/completions", json=over_http(sent))
    assert answer.status_code == 200, answer.text


def test_each_row_is_wrong_by_what_it_changes() -> None:
    """The requests that the rows change are answered at each door."""
    client, service, pipelines = served(ENDED)
    assert client.post("/v1/completions", json={"prompt": "def"}).status_code == 200
    assert asyncio.run(grpc_api.generate(service, gen.GenerateRequest(text="def"))).choices
    assert asyncio.run(grpc_api.generate(service, gen.GenerateRequest(**conversation()))).choices
    chat = TestClient(http_app(service_of("qwen", Answering("qwen", "a", cut=0))))
    assert chat.post("/v1/chat/completions", json={"messages": [USER]}).status_code == 200
    assert client.post("/tokenize", json={"prompt": "a"}).json()["tokens"] == ids("a")
    assert len(pipelines.requests) == 3


@pytest.mark.parametrize(
    ("body", "content_type", "words"),
    [
        (b'{"prompt": ', "application/json", "body: is not valid JSON"),
        (b'{"prompt": "\xff"}', "application/json", "body: must be JSON in UTF-8"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", "body: must be JSON in UTF-8"),
        (b"", "application/json", "body: must be a JSON object"),
        (b"[]", "application/json", "body: must be a JSON object"),
        (b'"text"', "application/json", "body: must be a JSON object"),
        (b'{"prompt": "a"}', "text/plain", "content-type: application/json"),
        (b"\xff\xfe{", "application/json", "body"),
        (b"{}", "application/json", "prompt: is required"),
        (b'{"prompt": {"a": 1}}', "application/json", "prompt: {'a': 1} is refused: must be a text or a list"),
        (b'{"prompt": "a", "\\ud800": 1}', "application/json", "body"),
        (b'{"prompt": "a", "timeout_s": -Infinity}', "application/json", "timeout_s: -inf must be above 0 and finite"),
        (b'{"prompt": "a", "timeout_s": 1e400}', "application/json", "timeout_s: inf must be above 0 and finite"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_malformed_body_is_refused(body: bytes, content_type: str, words: str) -> None:
    answer = SCRIPTED.post("/v1/completions", content=body, headers={"content-type": content_type})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
