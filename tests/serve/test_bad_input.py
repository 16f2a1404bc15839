"""Wrong requests at the real server, which goes on serving. Their table is tests/unit/deploy/test_wrong_requests.py."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
import requests

from tests.serve.conftest import Server
from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core._gen.triforce.v1.generation_pb2_grpc import GenerationStub
from triforce_core.client import InvalidRequestError, NotFoundError, TriForceClient


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"temperature": "hot"}, 400, "temperature", "'hot' is refused"),
        ({"temperature": float("nan")}, 400, "temperature", "nan must be between"),
        ({"prompt": "\ud800"}, 400, "prompt", "lone surrogates"),
        ({"prompt": "x" * 5_000_000}, 400, "prompt", "'5000000 characters' cannot fit the context of 16384 tokens"),
        ({"prompt": [1] * 16384, "max_tokens": 1}, 400, "prompt", "16384 prompt + 1 output tokens"),
        ({"model": "gpt-5"}, 404, "model", "'gpt-5' is not served here; 'demo' is"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_value_is_named(
    server: Server, stream: bool, fields: dict[str, Any], status: int, param: str, words: str
) -> None:
    answer = server.complete(**{"stream": stream, **fields})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert words in error["message"]


@pytest.mark.parametrize("body", [b'{"prompt": ', b'{"prompt": "\xff"}', b"", b'"text"'])
def test_a_malformed_body_is_refused(server: Server, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = requests.post(f"{server.url}/v1/completions", data=body, headers=headers, timeout=30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body"), answer.text


def test_mistakes_are_named_over_grpc(client: TriForceClient) -> None:
    for call in (client.generate, lambda *args, **named: list(client.stream(*args, **named))):
        with pytest.raises(InvalidRequestError, match=r"^temperature: -1\.0 must be between 0 and 100"):
            call("def", temperature=-1)
        with pytest.raises(InvalidRequestError, match=r"^regex: '\(a' cannot be compiled"):
            call("def", regex="(a")
        with pytest.raises(NotFoundError, match="'other' is not served here"):
            call("def", model="other")


def test_a_request_without_a_prompt_is_refused(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel, pytest.raises(grpc.RpcError) as refused:
        GenerationStub(channel).Generate(pb.GenerateRequest())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prompt: None must be a text, token ids or messages" in refused.value.details()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("GET", "/v2", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/", 404),
    ],
)
def test_unknown_paths_are_answered_in_the_same_shape(server: Server, method: str, path: str, status: int) -> None:
    answer = requests.request(method, server.url + path, timeout=30)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_openai_s_fields_are_accepted_where_they_ask_for_nothing(server: Server) -> None:
    nothing = {"n": 1, "best_of": 1, "echo": False, "presence_penalty": 0, "frequency_penalty": 0.0, "user": "me"}
    names = ("logprobs", "suffix", "logit_bias", "stop", "seed", "max_tokens", "temperature", "stream_options")
    answer = server.complete(**nothing, **dict.fromkeys((*names, "priority", "timeout_s")))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] <= 16
    assert json.loads(answer.text)["choices"][0]["logprobs"] is None
