"""The page of the HTTP API, from its OpenAPI document and its table of errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from deploy.no_effect import IGNORED, NO_EFFECT
from deploy.openai_api.errors import ANSWERS, RETRY
from deploy.openai_api.routes import http_app
from scripts.reference.markdown import code, fenced, sentence, table

SECTIONS = (
    ("CompletionRequest", "A completion request"),
    ("Speculation", "`speculation`"),
    ("ResponseFormat", "`response_format`"),
    ("NamedSchema", "`response_format.json_schema`"),
    ("StructuredOutputs", "`structured_outputs`"),
    ("ChatRequest", "A chat completion request"),
    ("Message", "`messages`"),
    ("ToolCall", "`messages.tool_calls`"),
    ("CalledFunction", "`messages.tool_calls.function`"),
    ("Tool", "`tools`"),
    ("Function", "`tools.function`"),
    ("TokenizeRequest", "Text to tokens"),
    ("DetokenizeRequest", "Tokens to text"),
)


def page() -> str:
    unused: Any = None  # the routes are described without a service behind them
    document = http_app(unused).openapi()
    parts = [
        "# HTTP\n",
        "For clients: the routes of the HTTP API, the fields of a request, its answers and errors.\n",
        "The API is that of OpenAI's completions and [chat completions](../chat.md), with a few fields more; a running"
        " server describes it at `/openapi.json` for tools and at `/docs` for readers. At `/` there is a page for"
        " people, a client of this API.\n",
        "## Routes\n",
        table(("route", "statuses", "meaning"), [route_of(*each) for each in routes_in(document)]),
    ]
    for name, title in SECTIONS:
        schema = document["components"]["schemas"][name]
        rows = [field_of(field, each, schema) for field, each in schema["properties"].items()]
        parts += [f"## {title}\n", sentence(schema["description"]) + "\n"]
        parts.append(table(("field", "type", "default", "meaning"), rows))
    parts += [
        "## Fields without effect\n",
        "Clients send these by default. Each is accepted in any object of a request, with the values named here or"
        " `null`; another value is refused, if the object has no use for it.\n",
        table(("field", "values without effect", "instead of others"), [*map(no_effect_of, NO_EFFECT)]),
        f"Accepted and ignored, whatever their value is: {', '.join(map(code, sorted(IGNORED)))}.\n",
    ]
    errors = [
        (str(answer.status), code(answer.type), code(answer.code), sentence(error.__doc__), retry_of(RETRY, answer))
        for error, answer in ANSWERS.items()
    ]
    parts += [
        "## Answers\n",
        "An answer and a chunk of a stream have OpenAI's fields, and `triforce`: how the output was made (where an"
        " answer has several choices, it is in each). In a stream"
        " (`stream: true`,"
        " server-sent events) the first chunk has the seed and the last one the other fields of"
        " `triforce`; the stream ends with `data: [DONE]`. With `return_token_ids`, a choice has `token_ids` and, for"
        " each of them, the tier that drew it (`origins`: `draft`, `lookup`, `retrieval` or `target`) and the text that"
        " it completes (`texts`); and every chunk with `token_ids`, except the last, has"
        " `prompt_tokens`, `acceptance` and `plan` in `triforce`, as they are so far.\n",
        fenced("json", "docs/examples/completion.json"),
        "`GET /metrics` has [metrics for Prometheus](metrics.md).\n",
        "`GET /status` shows each tier of each replica. Most of its fields are those of"
        " [`TierStatus`](grpc.md#what-a-tier-reports); `controller.plans` is called `rounds` here. Counts of passes,"
        " the size of the KV pool, waiting requests and most totals are in `/metrics` instead."
        " [Operations](../operations.md#what-to-watch) says what to watch.\n",
        fenced("json", "docs/examples/status.json"),
        "## Errors\n",
        'Every error has the body `{"error": {"message", "type", "param", "code"}}`; `param` names the field. An error'
        " after the first event of a stream is an event with that body, since the status is already sent.\n",
        table(("status", "type", "code", "meaning", "header"), errors),
        "A body that breaks the schema gets 400 and the code `malformed_request`, `unknown_parameter` for a field that"
        " the request does not have, or `unsupported_value` for a field without effect that asks for something."
        " `POST /v1/responses` and `POST /v1/embeddings` get 404. An unforeseen error gets 500 and `internal_error`,"
        " with an id that the server's log explains.\n",
    ]
    return "\n".join(parts)


def retry_of(headers: dict[int | str, list[tuple[str, str]]], answer: Any) -> str:
    found = headers.get(answer.code, headers.get(answer.status, []))
    return ", ".join(f"`{name}: {value}`" for name, value in found)


def routes_in(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    return ((path, verb, operation) for path, verbs in document["paths"].items() for verb, operation in verbs.items())


def route_of(path: str, verb: str, operation: dict[str, Any]) -> tuple[str, str, str]:
    meaning = operation.get("description") or operation["summary"]
    return code(f"{verb.upper()} {path}"), ", ".join(operation["responses"]), sentence(meaning)


def no_effect_of(name: str) -> tuple[str, str, str]:
    values, instead = NO_EFFECT[name]
    return code(name), " or ".join(code(json.dumps(value)) for value in values) or "none", instead


def field_of(name: str, schema: dict[str, Any], owner: dict[str, Any]) -> tuple[str, str, str, str]:
    default = "required" if name in owner.get("required", ()) else code(json.dumps(schema.get("default")))
    meaning = schema.get("description", "as in OpenAI's API")
    return code(name), " or ".join(dict.fromkeys(kinds_in(schema))) or "null", default, meaning


def kinds_in(schema: dict[str, Any]) -> Iterator[str]:
    """The types that a field admits; null stands for leaving it out and is not named."""
    for each in schema.get("anyOf", [schema]):
        if "$ref" in each:
            yield code(each["$ref"].rpartition("/")[2])
        elif "enum" in each or "const" in each:
            yield ", ".join(map(code, each.get("enum", [each.get("const")])))
        elif each.get("type") == "array":
            yield f"list of {' or '.join(kinds_in(each['items']))}"
        elif each.get("type") == "object":
            values = each["additionalProperties"]
            yield "object" if values is True else f"mapping to {' or '.join(kinds_in(values))}"
        elif each.get("type") != "null":
            yield str(each.get("type", "any value"))
