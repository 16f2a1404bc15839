"""Sends the requests of a file through whatever release of Anthropic's SDK runs this: whole, through its stream helper,
and as raw events; counts their tokens; asks for what is refused. Prints the answers.

python ask_anthropic.py URL MODEL FILE [EXTRA FIELDS AS JSON]
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

from anthropic import Anthropic, APIStatusError

REFUSED: dict[str, dict[str, Any]] = {
    "no tokens": {"max_tokens": 0},
    "an unknown field": {"max_tokens": 1, "nonsense": True},
    "an image": {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    "another model": {"max_tokens": 1, "model": "another"},
    "too long": {"max_tokens": 1, "messages": [{"role": "user", "content": "word " * 100_000}]},
}


def given(create: Callable[..., Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call. What this release has no argument for goes into the body, as its users do."""
    named = inspect.signature(create).parameters
    return {name: fields[name] for name in fields if name in named} | {
        "extra_body": {name: fields[name] for name in fields if name not in named}
    }


def refusal(client: Anthropic, fields: dict[str, Any]) -> list[Any]:
    try:
        client.messages.create(**given(client.messages.create, fields))
    except APIStatusError as error:
        body: Any = error.body
        return [type(error).__name__, error.status_code, body["error"]["type"]]
    return []


def main(url: str, model: str, file: str, more: str = "{}") -> None:
    client = Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    api = client.messages
    with open(file) as opened:
        cases = json.load(opened)
    found: dict[str, Any] = {}
    for name, case in cases.items():
        asked = {"model": model, **case["messages"], **json.loads(more)}
        whole = api.create(**given(api.create, asked))
        events = [event.to_dict() for event in api.create(**given(api.create, asked), stream=True)]
        with api.stream(**given(api.stream, asked)) as stream:
            texts = [*stream.text_stream]
            helped = stream.get_final_message()
        counted = {name: asked[name] for name in asked if name in inspect.signature(api.count_tokens).parameters}
        found[name] = {"whole": whole.to_dict(), "events": events, "helped": helped.to_dict(), "texts": texts}
        found[name]["counted"] = api.count_tokens(**counted).input_tokens
    hello = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    refused = {name: refusal(client, hello | fields) for name, fields in REFUSED.items()}
    refused["a wrong key"] = refusal(Anthropic(base_url=url, api_key="wrong", max_retries=0), hello)
    models = [each.id for each in client.models.list()]
    models.append(client.models.retrieve(model).id)
    json.dump({"answers": found, "refused": refused, "models": models}, sys.stdout)


main(*sys.argv[1:])
