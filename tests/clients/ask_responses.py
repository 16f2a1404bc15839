"""Sends the requests of a file to the Responses API through whatever openai-python runs this: whole, as raw events, and
through its stream helper; parses an answer; asks for what is refused. Prints the answers.

python ask_responses.py BASE_URL MODEL FILE [EXTRA FIELDS AS JSON]
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

from openai import APIStatusError, OpenAI
from pydantic import BaseModel

REFUSED: dict[str, dict[str, Any]] = {
    "a stored answer": {"store": True},
    "an earlier answer": {"previous_response_id": "resp_1"},
    "a tool of OpenAI's": {"tools": [{"type": "file_search", "vector_store_ids": ["1"]}]},
    "no tokens": {"max_output_tokens": 0},
    "another model": {"model": "another"},
}


class Point(BaseModel):
    x: int
    y: int


def given(create: Callable[..., Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call. What this release has no argument for goes into the body, as its users do."""
    named = inspect.signature(create).parameters
    return {name: fields[name] for name in fields if name in named} | {
        "extra_body": {name: fields[name] for name in fields if name not in named}
    }


def refusal(client: OpenAI, fields: dict[str, Any]) -> list[Any]:
    try:
        client.responses.create(**fields)
    except APIStatusError as error:
        body: Any = error.body
        return [type(error).__name__, error.status_code, body["param"]]
    return []


def main(base_url: str, model: str, file: str, more: str = "{}") -> None:
    client = OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)
    api = client.responses
    with open(file) as opened:
        cases = json.load(opened)
    found = {}
    for name, case in cases.items():
        if "responses" not in case:
            continue
        asked = {"model": model, **case["responses"], **json.loads(more)}
        whole = api.create(**given(api.create, asked))
        events = [event.to_dict() for event in api.create(**given(api.create, asked), stream=True)]
        with api.stream(**given(api.stream, asked)) as stream:
            *_, last = stream  # not `get_final_response`, which takes only answers that were not cut off
        found[name] = {"whole": whole.to_dict(), "events": events, "helped": last.response.to_dict()}
        found[name]["texts"] = [whole.output_text]
    parsed = api.parse(model=model, input="a point", text_format=Point, max_output_tokens=400, extra_body={"seed": 2})
    assert isinstance(parsed.output_parsed, Point), parsed
    hello = {"model": model, "input": "hello", "max_output_tokens": 1}
    refused = {name: refusal(client, hello | fields) for name, fields in REFUSED.items()}
    refused["a wrong key"] = refusal(OpenAI(base_url=base_url, api_key="wrong", max_retries=0), hello)
    json.dump({"answers": found, "refused": refused, "parsed": parsed.output_parsed.model_dump()}, sys.stdout)


main(*sys.argv[1:])
