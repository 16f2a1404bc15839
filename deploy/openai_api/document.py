"""The OpenAPI document, with what the guard adds to every route, and a page that shows it and loads nothing."""

import json
import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from deploy.openai_api.errors import documented
from deploy.openai_api.guard import OPEN_PATHS

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid #8886; }
code { font-family: ui-monospace, monospace; overflow-wrap: anywhere; }
"""
NOTHING_ELSE = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
OPEN, KEYED, WITH_BODY = documented(400), documented(400, 401), documented(400, 401, 408, 413, 429, 503)


def describe(app: FastAPI) -> None:
    """Add the page at /docs, and make the document name what the guard may answer: call it after all routes."""
    plain = app.openapi

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(app.openapi()), headers=NOTHING_ELSE)

    def whole() -> dict[str, Any]:
        document = plain()  # kept by FastAPI, so this is done once
        if "securitySchemes" not in document["components"]:
            add_guard(document)
        return document

    app.openapi = whole  # type: ignore[method-assign]  # FastAPI's own way to extend the document


def add_guard(document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    for path, operation in operations(document):
        guarded = OPEN if path in OPEN_PATHS else WITH_BODY if "requestBody" in operation else KEYED
        for status, response in guarded.items():
            added = {"description": response["description"], "content": error}
            operation["responses"].setdefault(str(status), added)
        operation["responses"] = dict(sorted(operation["responses"].items()))
        if path not in OPEN_PATHS:
            operation["security"] = [{"key": []}, {}]  # the server may need none


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((path, operation) for path, verbs in document["paths"].items() for operation in verbs.values())


def page(document: dict[str, Any]) -> str:
    """The document as HTML, without scripts."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><main><h1>{title}</h1>',
        '<p>The same as a document for tools: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    return "".join([*parts, *described(document), "</main></body></html>\n"])


def described(document: dict[str, Any]) -> Iterator[str]:
    """The operations and the schemas, each after a heading."""
    for path, verbs in document["paths"].items():
        for verb, operation in verbs.items():
            yield from operation_part(f"{verb.upper()} {path}", operation)
    yield "<h2>Schemas</h2>"
    for name, schema in document["components"]["schemas"].items():
        yield from schema_part(name, schema)


def operation_part(name: str, operation: dict[str, Any]) -> Iterator[str]:
    yield f"<h2><code>{escape(name)}</code></h2><p>{prose(operation.get('description', operation['summary']))}</p>"
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Body: {type_of(content['schema'])} as {escape(kind)}</p>"
    rows = [
        (escape(each["name"]), escape(each["in"]), type_of(each["schema"])) for each in operation.get("parameters", ())
    ]
    if rows:
        yield table(("parameter", "in", "type"), rows)
    yield table(
        ("status", "meaning", "body"),
        [
            (
                escape(status),
                prose(each["description"]),
                " or ".join(
                    type_of(content["schema"]) if "schema" in content else escape(kind)
                    for kind, content in each.get("content", {}).items()
                ),
            )
            for status, each in operation["responses"].items()
        ],
    )


def schema_part(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3><p>{prose(schema.get("description", ""))}</p>'
    if "properties" not in schema:
        yield f"<p>{type_of(schema)}</p>"
        return
    yield table(
        ("field", "type", "default", "meaning"),
        [
            (
                f"<code>{escape(field)}</code>",
                type_of(each),
                "required" if field in schema.get("required", ()) else default_of(each),
                prose(each.get("description", "")),
            )
            for field, each in schema["properties"].items()
        ],
    )


def default_of(schema: dict[str, Any]) -> str:
    """The default; of a section of settings none, since the section has a table of its own."""
    return code(schema["default"]) if "default" in schema and "$ref" not in schema else ""


def type_of(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a>'
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(type_of(each) for each in schema[several]))
    if "enum" in schema or "const" in schema:
        return ", ".join(code(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {type_of(schema.get('items') or schema.get('prefixItems', [{}])[0])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"mapping to {type_of(schema['additionalProperties'])}"
    bounds = [f" {sign} {schema[bound]}" for bound, sign in BOUNDS.items() if bound in schema]
    return escape(",".join([str(schema.get("type", "any value")), *bounds]))


def prose(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def code(value: Any) -> str:
    return f"<code>{escape(json.dumps(value))}</code>"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = "".join(f'<th scope="col">{each}</th>' for each in head)
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"
