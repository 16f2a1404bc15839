"""What a parameter that was written as plain text means, by the JSON schema of its function's arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from triforce_core.errors import require

ALL_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
TEXT = frozenset({"string"})
PYTHON = {"True": "true", "False": "false", "None": "null"}  # as templates write them that do not write JSON
NOTES = {
    "type",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "$schema",
}  # keywords that allow any value
PARTS = {"properties", "required", "additionalProperties", "strict", "$defs", "definitions"}  # of the arguments' schema
DEPTH = 16  # references that are followed from one to the next
MOST_PARTS = 256  # schemas within a schema that are looked at for its types; with more, it may be anything


def property_of(schema: Any, key: str) -> Any:
    """The schema of a property; of one that is not declared, {}."""
    schema = resolved(schema, schema)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key, {}) if isinstance(properties, Mapping) else {}


def json_of(text: str, schema: Any, key: str) -> str:
    """The JSON of a property's value. A string stands as it is; anything else is JSON, or a constant as Python writes
    it. What is neither is a string.
    """
    types = types_of(property_of(schema, key), schema)
    if types == TEXT:
        return quoted(text)
    found = text.strip()
    found = PYTHON.get(found, found)
    try:
        kind = type_of(json.loads(found, parse_constant=int))  # NaN and the like are no JSON, and no integers
    except (ValueError, RecursionError):
        return quoted(text)
    return quoted(text) if kind == "string" or ("string" in types and kind not in types) else found


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Any, root: Any, known: dict[int, frozenset[str]] | None = None) -> frozenset[str]:
    """The types that values under a schema may have, or more: a schema within itself may be anything. `known`: of the
    schemas that were looked at, by their identity, so that none is looked at twice.
    """
    schema, known = resolved(schema, root), {} if known is None else known
    if schema is False:
        return frozenset()
    if not isinstance(schema, Mapping) or len(known) > MOST_PARTS:
        return ALL_TYPES
    if id(schema) in known:
        return known[id(schema)]
    found = known[id(schema)] = ALL_TYPES
    if "type" in schema:
        given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        found &= {*map(str, given), *(["integer"] if "number" in given else [])}
    if isinstance(schema.get("enum"), list):
        found &= {type_of(value) for value in schema["enum"]}
    if "const" in schema:
        found &= {type_of(schema["const"])}
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list):
            found &= frozenset[str]().union(*(types_of(each, root, known) for each in schema[keyword]))
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else []:
        found &= types_of(each, root, known)
    known[id(schema)] = found
    return found


def type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {type(None): "null", int: "integer", float: "number", str: "string", list: "array"}
    return names.get(type(value), "object")


def resolved(schema: Any, root: Any) -> Any:
    """What a schema that refers to another one in the same document refers to."""
    for _ in range(DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = root
        for name in filter(None, reference[1:].split("/")):
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return None


@dataclass(frozen=True, slots=True)
class JsonValue:
    """A value that is written as JSON."""

    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Words:
    """One of these texts, as it stands."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """Any text of so many characters, as it stands."""

    least: int = 0
    most: int | str = ""


Value = JsonValue | Words | Text


def parameters_of(function: Mapping[str, Any], keyed: str, valued: str) -> list[tuple[str, bool, Value]]:
    """The parameters of a function's arguments, each with whether it is needed, and its value. `keyed` ends a key, and
    `valued` a value, so they cannot be in one.

    Raises `InvalidValueError` where such values, read back, could break the schema.
    """
    root, name = function.get("parameters") or {}, function["name"]
    schema = resolved(root, root)
    check_keywords(root, {"$ref", "$defs", "definitions"} if "$ref" in root else NOTES | PARTS, name)
    check_keywords(schema, NOTES | PARTS, name)
    needed = schema.get("required") or []
    others = schema.get("additionalProperties", True)
    found = []
    for key, each in {**dict.fromkeys(needed, others), **(schema.get("properties") or {})}.items():
        place = f"{name}.{key}"
        require(keyed not in key, "tools", place, f"must not have {keyed}, which ends names in this model's calls")
        found.append((key, key in needed, value_of(each, root, place, valued)))
    return found


def value_of(given: Any, root: Any, place: str, valued: str) -> Value:
    schema, known = resolved(given, root), dict[int, frozenset[str]]()
    if not isinstance(schema, Mapping):
        require(schema is True, "tools", place, "can have no value")
        return Text()
    types = types_of(schema, root, known)
    require(len(known) <= MOST_PARTS, "tools", place, f"has more than {MOST_PARTS} parts")
    if "string" not in types:
        return JsonValue({**(definitions_of(root, place) if any(references(given)) else {}), **given})
    if types != TEXT:
        check_free(given, root, place, set())
        return Text()
    check_reference(given, place)
    if "enum" in schema or "const" in schema:
        check_keywords(schema, NOTES | {"enum", "const"}, place)
        listed = schema.get("enum", [schema.get("const")])
        require(isinstance(listed, list), "tools", place, "must have a list as its enum")
        words = [word for word in listed if isinstance(word, str) and word == schema.get("const", word)]
        require(bool(words), "tools", place, "can have no value")
        rule = f"must not have {valued}, which ends values in this model's calls"
        for word in words:
            require(valued not in word, "tools", f"{place}: {word}", rule)
        return Words(tuple(words))
    check_keywords(schema, NOTES | {"minLength", "maxLength"}, place)
    least, most = int(schema.get("minLength", 0)), float(schema.get("maxLength", math.inf))
    require(least <= most, "tools", place, f"can have no value: minLength {least} is above maxLength")
    return Text(least, "" if math.isinf(most) else int(most))


def definitions_of(root: Mapping[str, Any], place: str) -> dict[str, Any]:
    """What a part of a schema needs to stand alone. Raises `InvalidValueError` for references to another part."""
    for reference in references(root):
        rule = "refers to the arguments as a whole, which is not supported where calls are forced; use $defs"
        require(reference.startswith(("#/$defs/", "#/definitions/")), "tools", f"{place}: {reference}", rule)
    return {name: root[name] for name in ("$defs", "definitions") if name in root}


def references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        yield schema["$ref"]
    parts = schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ()
    for part in parts:
        yield from references(part)


def check_free(given: Any, root: Any, place: str, seen: set[int]) -> None:
    """Values that may be text or something else are read back as either, so no keyword can be kept to but the type.
    `seen`: the schemas that were checked, by their identity.
    """
    check_reference(given, place)
    schema = resolved(given, root)
    if isinstance(schema, bool) or id(schema) in seen:
        return
    require(isinstance(schema, Mapping), "tools", place, "refers to no schema")
    seen.add(id(schema))
    check_keywords(schema, NOTES | {"anyOf", "oneOf"}, place)
    kinds = [kind for each in schema.get("oneOf", ()) for kind in types_of(each, root)]
    require(len({*kinds}) == len(kinds), "tools", place, "has oneOf, of which values can be of two kinds")
    for keyword in ("anyOf", "oneOf"):
        for each in schema.get(keyword, ()):
            check_free(each, root, place, seen)


def check_reference(schema: Any, place: str) -> None:
    if isinstance(schema, Mapping) and "$ref" in schema:
        check_keywords(schema, (NOTES - {"type"}) | {"$ref"}, place)


def check_keywords(schema: Mapping[str, Any], known: set[str], place: str) -> None:
    for keyword in schema:
        rule = f"has {keyword}, to which forced calls in this model's form cannot be kept"
        require(keyword in known, "tools", place, rule)
