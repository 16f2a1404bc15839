"""What clients do wrong is answered in OpenAI's shape, naming field, value and rule; and the server goes on serving."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests

from tests.serve.conftest import Server

CASES: list[tuple[dict[str, Any], int, str, str]] = [  # what is sent, the status, the field, a part of the message
    ({"prompt": ""}, 400, "prompt", "must not be empty"),
    ({"prompt": []}, 400, "prompt", "at least one token"),
    ({"prompt": "\ud800"}, 400, "prompt", "lone surrogates"),
    ({"prompt": [5, 4096]}, 400, "prompt", "4096 is not a token id: must be at least 0 and below 4096"),
    ({"prompt": [-1]}, 400, "prompt", "-1 is not a token id"),
    ({"prompt": ["a", "b"], "n": 5}, 400, "prompt", "'2 prompts' must need at most 8 places"),
    ({"prompt": 5}, 400, "prompt", "must be a text or a list of token ids"),
    ({"prompt": ["a", 5]}, 400, "prompt", "must be a text or a list of token ids"),
    ({"prompt": None}, 400, "prompt", "must be a text or a list of token ids"),
    ({"prompt": "x" * 100_000}, 400, "prompt", "must fit the context of 16384 tokens"),
    ({"prompt": "x" * 5_000_000}, 400, "prompt", "'5000000 characters' cannot fit the context of 16384 tokens"),
    ({"prompt": [1] * 16384, "max_tokens": 1}, 400, "prompt", "16384 prompt + 1 output tokens"),
    ({"max_tokens": 100_000}, 400, "prompt", "100000 output tokens"),
    ({"model": "gpt-5"}, 404, "model", "'gpt-5' is not served here; 'demo' is"),
    ({"max_tokens": 0}, 400, "max_tokens", "0 must be at least 1"),
    ({"max_tokens": -5}, 400, "max_tokens", "-5 must be at least 1"),
    ({"max_tokens": "16"}, 400, "max_tokens", "'16' is refused: Input should be a valid integer"),
    ({"max_tokens": 1.5}, 400, "max_tokens", "integer"),
    ({"temperature": -0.1}, 400, "temperature", "-0.1 must be between 0 and 100"),
    ({"temperature": float("nan")}, 400, "temperature", "nan must be between"),
    ({"temperature": "hot"}, 400, "temperature", "'hot' is refused"),
    ({"temperature": True}, 400, "temperature", "True is refused"),
    ({"top_p": -0.1}, 400, "top_p", "must be above 0"),
    ({"top_p": 1.01}, 400, "top_p", "1.01 must be above 0 and at most 1"),
    ({"top_k": -2}, 400, "top_k", "-2 must be 0 (off) or more"),
    ({"top_k": 2**32}, 400, "top_k", "must be 0 (off) or more, and below 2**31"),
    ({"min_p": 2}, 400, "min_p", "must be between 0 and 1"),
    ({"seed": 2**63}, 400, "seed", "must be at least -2**63 and below 2**63"),
    ({"stop": ""}, 400, "stop", "must not hold an empty string"),
    ({"stop": ["a"] * 17}, 400, "stop", "has 17 entries, of which at most 16 are allowed"),
    ({"stop": ["a", "b" * 100_000]}, 400, "stop", "100000 must be at most 1024 characters in each string"),
    ({"stop": [1]}, 400, "stop", "must be a text or a list of texts"),
    ({"stream": "yes"}, 400, "stream", "'yes' is refused"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "needs stream: true"),
    ({"stream_options": {"nonsense": 1}}, 400, "stream_options.nonsense", "is not a field of this request"),
    ({"speculation": {"lookaheads": []}}, 400, "speculation.lookaheads", "[] must be two numbers"),
    ({"speculation": {"lookaheads": [8]}}, 400, "speculation.lookaheads", "[8] must be two numbers"),
    ({"speculation": {"lookaheads": [8, 65]}}, 400, "speculation.lookaheads", "at most 64"),
    ({"speculation": {"lookaheads": [-1, 3]}}, 400, "speculation.lookaheads", "at least 0"),
    ({"speculation": {"drafter": "human"}}, 400, "speculation.drafter", "must be one of model, lookup, both"),
    ({"speculation": {"selector": "best"}}, 400, "speculation.selector", "must be one of mean_key, snapkv"),
    ({"speculation": {"selector": "quest"}}, 400, "speculation.selector", "was removed: use snapkv"),
    ({"speculation": {"tiers": "draft"}}, 400, "speculation.tiers", "'draft' is refused"),
    ({"timeout_s": 0}, 400, "timeout_s", "must be above 0"),
    ({"timeout_s": -1}, 400, "timeout_s", "-1.0 must be above 0 and finite"),
    ({"timeout_s": float("nan")}, 400, "timeout_s", "nan must be above 0 and finite"),
    ({"timeout_s": float("inf")}, 400, "timeout_s", "inf must be above 0 and finite"),
    ({"timeout_s": 10**400}, 400, "timeout_s", "is refused"),
    ({"timeout_s": "5"}, 400, "timeout_s", "'5' is refused"),
    ({"priority": 101}, 400, "priority", "101 must be at least -100 and at most 100"),
    ({"priority": -(2**40)}, 400, "priority", "must be at least -100 and at most 100"),
    ({"priority": 0.5}, 400, "priority", "0.5 is refused: Input should be a valid integer"),
    ({"priority": True}, 400, "priority", "True is refused"),
    ({"n": 9}, 400, "n", "9 must be at least 1 and at most 8"),
    ({"best_of": 3}, 400, "best_of", "is not supported"),
    ({"logprobs": 21}, 400, "logprobs", "21 must be between 0 and 20"),
    ({"guided_regex": "(["}, 400, "guided_regex", "cannot be compiled"),
    ({"suffix": "end"}, 400, "suffix", "is not supported"),
    ({"logit_bias": {"5": 101.0}}, 400, "logit_bias", "'5: 101.0' must be between -100 and 100"),
    ({"logit_bias": {"five": 1.0}}, 400, "logit_bias", "'five' is not a token id"),
    ({"logit_bias": {"5" * 5000: 1.0}}, 400, "logit_bias", "is not a token id"),
    ({"logit_bias": {"4096": 1.0}}, 400, "logit_bias", "4096 is not a token id: must be at least 0 and below 4096"),
    ({"presence_penalty": 2.5}, 400, "presence_penalty", "2.5 must be between -2 and 2"),
    ({"frequency_penalty": -3}, 400, "frequency_penalty", "-3.0 must be between -2 and 2"),
    ({"repetition_penalty": 0.0}, 400, "repetition_penalty", "0.0 must be at least 0.01 and at most 100"),
    ({"min_tokens": 20, "max_tokens": 5}, 400, "min_tokens", "20 must be at most max_tokens, 5"),
    ({"max_token": 5}, 400, "max_token", "5 is not a field of this request"),
]


@pytest.mark.parametrize(("fields", "status", "param", "words"), CASES, ids=lambda value: str(value)[:40])
def test_a_bad_value_is_named(server: Server, fields: dict[str, Any], status: int, param: str, words: str) -> None:
    answer = server.complete(**{"prompt": "def main():", **fields})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert words in error["message"]
    assert len(error["message"]) < 400
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["code"], str)


def test_a_bad_value_of_a_stream_is_an_ordinary_answer(server: Server) -> None:
    answer = server.stream(temperature=-1)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("body", "content_type", "status", "words"),
    [
        (b'{"prompt": ', "application/json", 400, "body: is not valid JSON"),
        (b'{"prompt": "\xff"}', "application/json", 400, "body: must be JSON in UTF-8"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", 400, "body: must be JSON in UTF-8"),
        (b'{"prompt": "a", "return_token_ids": null}', "application/json", 400, "return_token_ids: None is refused"),
        (b"", "application/json", 400, "body: must be a JSON object"),
        (b"[]", "application/json", 400, "body: must be a JSON object"),
        (b'"text"', "application/json", 400, "body: must be a JSON object"),
        (b'{"prompt": "a"}', "text/plain", 400, "content-type: application/json"),
        (b"\xff\xfe{", "application/json", 400, "body"),
        (b"{}", "application/json", 400, "prompt: is required"),
        (b'{"prompt": "a", "\\ud800": 1}', "application/json", 400, "body"),
    ],
)
def test_a_malformed_body_is_refused(server: Server, body: bytes, content_type: str, status: int, words: str) -> None:
    headers = {"content-type": content_type}
    answer = requests.post(f"{server.url}/v1/completions", data=body, headers=headers, timeout=30)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]["message"]


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
    nothing = {
        "n": 1,
        "best_of": 1,
        "echo": False,
        "logprobs": None,
        "suffix": None,
        "logit_bias": None,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "user": "me",
        "stop": None,
        "seed": None,
        "max_tokens": None,
        "temperature": None,
        "stream_options": None,
        "priority": None,
        "timeout_s": None,
    }
    answer = server.complete(**nothing)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] <= 16
    assert json.loads(answer.text)["choices"][0]["logprobs"] is None
