"""The page of all settings, from `triforce_core.config.Settings`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from scripts.reference.markdown import code, sentence, table
from triforce_core.config import Settings


def page() -> str:
    parts = [
        "# Settings\n",
        "For operators: every setting of `triforce.yaml`, with its type, default and meaning.\n",
        "`triforce serve --config triforce.yaml` reads the file, and `triforce config --config triforce.yaml` checks it"
        " and prints it with all defaults. Unknown keys are refused. [Models](../models.md) and"
        " [placement](../placement.md) say how to choose.\n",
    ]
    paths: dict[type[BaseModel], list[str]] = {}
    for path, section in sections_of(Settings, ""):
        paths.setdefault(section, []).append(code(path) if path else "Top level")
    for section, places in paths.items():
        rows = [setting(section, name) for name in section.model_fields if not is_section(section, name)]
        parts += [f"## {', '.join(places)}\n", sentence(section.__doc__) + "\n"]
        parts.append(table(("setting", "type", "default", "meaning"), rows))
    return "\n".join(parts)


def is_section(section: type[BaseModel], name: str) -> bool:
    kind = section.model_fields[name].annotation
    return inspect.isclass(kind) and issubclass(kind, BaseModel)


def sections_of(section: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """The section and those below it, by their full names."""
    yield path, section
    for name, field in section.model_fields.items():
        if is_section(section, name):
            inner: Any = field.annotation
            yield from sections_of(inner, f"{path}.{name}".removeprefix("."))


def setting(section: type[BaseModel], name: str) -> tuple[str, str, str, str]:
    field, schema = section.model_fields[name], section.model_json_schema()["properties"][name]
    default = "see the meaning" if field.default_factory else code(json.dumps(field.default))
    return code(name), kind_of(schema), default, field.description or ""


BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def kind_of(schema: dict[str, Any]) -> str:
    """The values that a setting takes, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(kind_of(each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(map(code, schema.get("enum", [schema.get("const")])))
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])}: {kind_of(schema['prefixItems'][0])}"
    if schema["type"] == "array":
        return f"list of {kind_of(schema['items'])}"
    if schema["type"] == "object":
        return f"mapping to {kind_of(schema['additionalProperties'])}"
    bounds = [f"{sign} {schema[bound]}" for bound, sign in BOUNDS.items() if bound in schema]
    return " ".join([schema["type"], ", ".join(bounds)]).strip()
