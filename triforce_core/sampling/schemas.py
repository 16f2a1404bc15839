"""JSON schemas as llguidance keeps them: what it would silently change is written in another way, or refused.

Whatever is rewritten allows the same texts or fewer, so that each output is valid under the schema as it was given.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import partial
from itertools import combinations, islice, permutations
from typing import Any

MAX_EXACT = 2**53  # the library reads all numbers as doubles, and integers are all different up to here
MAX_BOUND = 2**63 - 1024  # the largest double that the library's integers hold
DIGITS = 15  # of a number that the library reads exactly; others become a neighbour
SLACK = 4  # neighbours that a bound moves by, where it need not be exact
LEAST_STEP = 1e-15  # between numbers: zero's own next number has hundreds of digits
MAX_MULTIPLE = 10_000  # of a multipleOf without its point: the library builds a state for each remainder

DAY = (
    r"(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:1[26]|[2468][048]|[3579][26])00)-02-29)"
)
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# The library's own have days and seconds that no calendar has.
PATTERNS = {"date": f"^{DAY}$", "time": f"^{TIME}$", "date-time": f"^{DAY}T{TIME}$"}
FORMATS = {"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}  # which the library knows
OPTIONS = "x-guidance"  # the library's: a client's could turn its checks off

SCHEMA = {"additionalItems", "additionalProperties", "items", "not"}  # keywords whose value is a schema,
SCHEMAS = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}  # a list of schemas,
NAMED = {"properties", "patternProperties", "$defs", "definitions"}  # or schemas by name


def kept(schema: Any) -> Any:
    """The schema as the library keeps it. Raises `ValueError`, which names the place, for what it does not keep."""
    try:
        return _kept(schema, schema, "")
    except (AttributeError, OverflowError, TypeError) as error:  # a keyword's value is of another type than it must be
        raise ValueError(f"it is no JSON schema: {error}") from None


def whole(pattern: str) -> str:
    """The regular expression itself. Raises `ValueError` for one whose last character the library would drop."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("the backslash at the end of the regular expression has nothing to escape")
    return pattern


def _kept(schema: Any, root: Any, at: str) -> Any:
    if not isinstance(schema, dict):
        return schema
    for key, rewritten in LACKING.items():
        if key in schema:
            schema = _at(f"{at}.{key}" if at else key, partial(rewritten, root=root), schema)
    made = {
        key: _keyword(key, value, root, f"{at}.{key}" if at else key) for key, value in schema.items() if key != OPTIONS
    }
    _check_duplicates(schema, at)
    _close_bounds(made)
    more: list[tuple[str, Any]] = []
    if made.get("format") in PATTERNS:
        more.append(("pattern", PATTERNS[made.pop("format")]))
    elif isinstance(made.get("format"), str) and made["format"] not in FORMATS:
        del made["format"]  # an annotation
    if isinstance(made.get("oneOf"), list) and _exclude_each_other(made["oneOf"], root):
        more.append(("anyOf", made.pop("oneOf")))
    for key, value in more:
        if key in made:
            made["allOf"] = [*made.get("allOf", ()), {key: value}]
        else:
            made[key] = value
    return made


def _keyword(key: str, value: Any, root: Any, place: str) -> Any:
    """A keyword's value as the library keeps it."""
    if key in KEYWORDS:
        return _at(place, KEYWORDS[key], value)
    if key in SCHEMA and isinstance(value, dict):
        return _kept(value, root, place)
    if key in SCHEMAS and isinstance(value, list):
        return [_kept(each, root, f"{place}.{index}") for index, each in enumerate(value)]
    if key in NAMED and isinstance(value, dict):
        named = {name: _kept(each, root, f"{place}.{name}") for name, each in value.items()}
        return {_at(place, _pattern, p): s for p, s in named.items()} if key == "patternProperties" else named
    return value


def _at(place: str, keep: Callable[[Any], Any], value: Any) -> Any:
    try:
        return keep(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


# -- values ------------------------------------------------------------------------------------------------------------


# Characters that are written as \u…, which the grammar does not have: the library would leave them out.
UNQUOTED = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
CONTROLS = "must have no control characters, except newlines, tabs and the like"


def _constant(value: Any) -> Any:
    if isinstance(value, list):
        return [_constant(each) for each in value]
    if isinstance(value, dict):
        return {_constant(key): _constant(each) for key, each in value.items()}
    if isinstance(value, str) and UNQUOTED.search(value):
        raise ValueError(CONTROLS)
    if isinstance(value, int) and abs(value) > MAX_EXACT:
        raise ValueError(f"{value} must be between -{MAX_EXACT} and {MAX_EXACT}, as other integers are not exact")
    if isinstance(value, float) and not _short(value):
        raise ValueError(f"{value} must have at most {DIGITS} digits, as numbers with more are not exact")
    return value


def _short(value: float) -> bool:
    return math.isfinite(value) and len(Decimal(repr(value)).as_tuple().digits) <= DIGITS


def _bound(direction: float) -> Callable[[Any], Any]:
    """What makes a bound exact: the next integer in the direction that is."""

    def inward(value: Any) -> Any:
        if isinstance(value, float) and not _short(value):
            return value + direction * SLACK * math.ulp(value)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) <= MAX_EXACT:
            return value
        bound = max(-MAX_BOUND, min(value, MAX_BOUND))
        if (value - bound) * direction > 0:
            raise ValueError(f"{value} must be between -{MAX_BOUND} and {MAX_BOUND}")
        exact = float(bound)
        while (bound - int(exact)) * direction > 0:
            exact = math.nextafter(exact, direction * math.inf)
        return int(exact)

    return inward


def _close_bounds(made: dict[str, Any]) -> None:
    """Name the next number where the library would allow an exclusive bound itself: towards zero, unless integers."""
    if made.get("type") == "integer":
        return
    for exclusive, inclusive, direction in ("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1):
        bound, other = made.get(exclusive), made.get(inclusive)
        bound = other if bound is True else bound  # as in drafts up to the fourth
        if isinstance(bound, int | float) and not isinstance(bound, bool) and bound * direction >= 0:
            del made[exclusive]
            near = bound + direction * max(SLACK * math.ulp(bound), LEAST_STEP)
            made[inclusive] = near if other is None else direction * max(direction * near, direction * other)


def _multiple(value: Any) -> Any:
    if isinstance(value, int | float) and math.isfinite(value):
        _, digits, exponent = Decimal(repr(value)).as_tuple()
        coefficient = int("".join(map(str, digits))) * 10 ** max(0, int(exponent))
        if coefficient > MAX_MULTIPLE:
            raise ValueError(f"{value} must be at most {MAX_MULTIPLE} when the decimal point is left out")
    return value


def _check_duplicates(schema: dict[str, Any], at: str) -> None:
    """The library lets an additional property occur twice, which counts once."""
    least, free = schema.get("minProperties"), schema.get("additionalProperties", True)
    if isinstance(least, int) and (free is not False or schema.get("patternProperties")):
        most = 1 + len(schema.get("required") or ())
        if least > most:
            raise ValueError(
                f"{at}{'.' if at else ''}minProperties: {least} must be at most {most}, one more than what is required"
            )


# -- patterns ----------------------------------------------------------------------------------------------------------


def _pattern(pattern: Any) -> Any:
    """A pattern of a JSON schema in Rust's syntax, without a set of characters that the library quotes wrongly: one
    that has all control characters, but not both the quotation mark and the backslash, would get these two.
    """
    if not isinstance(pattern, str):
        return pattern
    if UNQUOTED.search(pattern):
        raise ValueError(CONTROLS)
    made, at, end = "", 0, len(whole(pattern))
    while at < end:
        if pattern[at] == "[":
            found = CLASS.match(pattern, at)
            if found is None:
                raise ValueError(f"{pattern!r} has a class of characters that is empty or does not end")
            made += _class(found["not"], found["body"])
        else:
            found = ESCAPE.match(pattern, at)
            assert found is not None
            if PROPERTY.match(pattern, at):
                raise ValueError(PROPERTIES)
            made += found[0]
        at = found.end()
    return made


ESCAPE = re.compile(r"\\.|.", re.DOTALL)
CLASS = re.compile(r"\[(?P<not>\^?)(?P<body>(?:\\.|[^\]\\])+)\]", re.DOTALL)
PROPERTY = re.compile(r"\\P|\\p(?!\{?[LMNPSZ])")
PROPERTIES = "of Unicode's properties, only \\p with one of L, M, N, P, S and Z is supported"
SPECIAL = re.compile(r"(?P<escaped>\\.)|\[|&&|--|~~", re.DOTALL)  # in Rust's classes alone


def _class(negated: str, body: str) -> str:
    written = SPECIAL.sub(lambda found: found["escaped"] or re.sub(r"(.)", r"\\\1", found[0]), body)
    if negated:  # a class that lacks one control character is quoted rightly
        dash = "\\" if written.startswith("-") else ""
        return rf"[^\x00{dash}{written}]"
    if PROPERTY.search(body):
        raise ValueError(PROPERTIES)
    try:
        matches = re.compile(f"[{written}]").match
    except re.error:  # Rust has some escapes that Python lacks; otherwise the library refuses it
        matches = re.compile(r"(?!)").match
    if matches("\0") and not (matches('"') and matches("\\")):
        raise ValueError(f"[{body}] must not have control characters without the quotation mark and the backslash")
    return f"[{written}]"


def _reference(reference: Any) -> Any:
    """A reference to the document or to one of its schemas: others are not looked at, and would be kept as they are."""
    parts = reference.split("/") if isinstance(reference, str) else []
    if parts and parts[0] == "#":
        del parts[0]
        while parts:
            keyword = parts.pop(0)
            if keyword in NAMED or (keyword in SCHEMAS and parts and parts[0].isdecimal()):
                del parts[:1]
            elif keyword not in SCHEMA:
                break
        else:
            return reference
    raise ValueError(f"{reference!r} must refer to # or to a schema under {', '.join(sorted(NAMED))}")


KEYWORDS: dict[str, Callable[[Any], Any]] = {
    "const": _constant,
    "enum": _constant,
    "minimum": _bound(1),
    "exclusiveMinimum": _bound(1),
    "maximum": _bound(-1),
    "exclusiveMaximum": _bound(-1),
    "multipleOf": _multiple,
    "pattern": _pattern,
    "$ref": _reference,
}


# -- keywords that the library lacks -----------------------------------------------------------------------------------


MAX_LISTED = 4000  # values of one enumeration, and schemas that it is made of
MAX_ARRANGEMENTS = 500  # arrays that stand for one with uniqueItems: 5 different items in any order are 326
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}


def _different_items(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """The schema without `uniqueItems`: of few different items, all arrays are listed."""
    wanted, made = schema["uniqueItems"], {key: value for key, value in schema.items() if key != "uniqueItems"}
    if not isinstance(wanted, bool):
        raise ValueError(f"{wanted!r} must be true or false")
    most = schema.get("maxItems", math.inf)
    if not wanted or most <= 1:
        return made
    first = schema.get("prefixItems", [])
    if first and (schema.get("items") is False or most <= len(first)) and _exclude_each_other(first, root):
        return made
    items = None if first or schema.get("type") != "array" else _values(schema.get("items"), root)
    if items is None:
        raise ValueError(
            "must be of an array whose items have few values (enum, const, boolean), or maxItems at most 1"
        )
    different = [each for place, each in enumerate(items) if not any(_equal(each, other) for other in items[:place])]
    lengths = range(schema.get("minItems", 0), int(min(most, len(different))) + 1)
    if not lengths:
        raise ValueError(f"there are only {len(different)} different items")
    every = (list(each) for length in lengths for each in permutations(different, length))
    arrays = [*islice(every, MAX_ARRANGEMENTS + 1)]
    if len(arrays) > MAX_ARRANGEMENTS:
        raise ValueError(f"more than {MAX_ARRANGEMENTS} arrays are possible: lower maxItems")
    if "enum" in made or "const" in made:
        listed = {json.dumps(each) for each in made.get("enum", [made.get("const")])}
        arrays = [each for each in arrays if json.dumps(each) in listed]
    if not arrays:
        raise ValueError("no array is possible")
    written = ("type", "items", "minItems", "maxItems", "enum", "const")
    return {key: value for key, value in made.items() if key not in written} | {"enum": arrays}


def _values(schema: Any, root: Any, left: Iterator[int] | None = None) -> list[Any] | None:
    """All values that are valid under the schema; None where they are not listed, or too many. `left`: counts the
    schemas and values that may still be looked at.
    """
    left = iter(range(MAX_LISTED)) if left is None else left
    schema = _resolved(schema, root)
    if not isinstance(schema, dict) or next(left, None) is None:
        return None
    said = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    if said.keys() == {"anyOf"}:
        branches = [_values(each, root, left) for each in said["anyOf"]]
        return None if None in branches else [value for branch in branches for value in branch or ()]
    if said in ({"type": "boolean"}, {"type": "null"}):
        return [True, False] if said["type"] == "boolean" else [None]
    if said.keys() - {"type"} not in ({"enum"}, {"const"}):
        return None
    values = said["enum"] if "enum" in said else [said["const"]]
    if any(next(left, None) is None for _ in values):
        return None
    return [value for value in values if _type_of(value) in _types(said)]


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return "integer" if isinstance(value, float) and value.is_integer() else kinds.get(type(value), "null")


def _equal(one: Any, other: Any) -> bool:
    """As JSON: true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other)


def _named_properties(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """The schema without `propertyNames`: names that are listed become properties, and others patterns."""
    made = {key: value for key, value in schema.items() if key != "propertyNames"}
    names = _resolved(schema["propertyNames"], root)
    if (listed := _values(names, root)) is not None:
        return _with_names(made, [name for name in listed if isinstance(name, str)])
    if names is True:
        return made
    said = {key: value for key, value in names.items() if key not in ANNOTATIONS} if isinstance(names, dict) else None
    if said in ({}, {"type": "string"}):
        return made  # every name is a string
    pattern = _pattern_of_names(said) if said else None
    if pattern is None or made.get("properties") or made.get("patternProperties"):
        raise ValueError("must be an enum; or a pattern, or lengths, where there are no properties")
    _pattern(pattern)
    other = made.get("additionalProperties", True)
    return made | {"patternProperties": {pattern: other}, "additionalProperties": False}


def _pattern_of_names(said: dict[str, Any]) -> str | None:
    """The pattern of names of which the schema says only a pattern, or only lengths."""
    if said.get("type", "string") != "string":
        return None
    if said.keys() - {"type"} == {"pattern"}:
        return str(said["pattern"])
    if said.keys() - {"type"} <= {"minLength", "maxLength"}:
        bounds = [said.get("minLength", 0), said.get("maxLength", "")]
        if any(isinstance(each, bool) or not (isinstance(each, int) or each == "") for each in bounds):
            raise ValueError("minLength and maxLength must be whole numbers")
        return rf"^[\s\S]{{{bounds[0]},{bounds[1]}}}$"
    return None


def _with_names(schema: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The schema of objects whose properties have no other names than these."""
    if "patternProperties" in schema:
        raise ValueError("must not stand beside patternProperties")
    declared, other = schema.get("properties", {}), schema.get("additionalProperties", True)
    properties = {name: declared.get(name, other) for name in names if name in declared or other is not False}
    if lacking := [name for name in schema.get("required", ()) if name not in properties]:
        raise ValueError(f"excludes {lacking[0]!r}, which is required")
    return schema | {"properties": properties, "additionalProperties": False}


LACKING: dict[str, Callable[..., dict[str, Any]]] = {
    "uniqueItems": _different_items,
    "propertyNames": _named_properties,
}


# -- oneOf -------------------------------------------------------------------------------------------------------------


MAX_COMPARISONS = 1000  # of the branches of one oneOf, and of what they refer to; beyond it is too much to look at


def _exclude_each_other(branches: list[Any], root: Any) -> bool:
    """Whether no value can be valid under two of the branches; then oneOf means the same as anyOf."""
    left = iter(range(MAX_COMPARISONS))
    return all(_disjoint(a, b, root, left) for a, b in combinations(branches, 2))


def _disjoint(a: Any, b: Any, root: Any, left: Iterator[int]) -> bool:
    if next(left, None) is None:
        return False
    a, b = _resolved(a, root), _resolved(b, root)
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    types = [_types(each) for each in (a, b)]
    if not types[0] & types[1]:
        return True
    values = [each["enum"] if "enum" in each else [each["const"]] if "const" in each else None for each in (a, b)]
    if isinstance(values[0], list) and isinstance(values[1], list):
        return not any(one == other or next(left, None) is None for one in values[0] for other in values[1])
    if types != [{"object"}, {"object"}]:
        return False
    names = set(a.get("required", ())) & set(b.get("required", ()))
    pairs = ((a.get("properties", {}).get(name), b.get("properties", {}).get(name)) for name in names)
    return any(_disjoint(one, other, root, left) for one, other in pairs)


def _types(schema: dict[str, Any]) -> set[str]:
    given = schema.get("type", ALL_TYPES)
    types = {given} if isinstance(given, str) else {*given}
    return types | {"integer"} if "number" in types else types


ALL_TYPES = ["null", "boolean", "number", "string", "array", "object"]


def _resolved(schema: Any, root: Any) -> Any:
    """What a schema that is a reference within the document refers to."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        schema = root
        for name in reference[2:].split("/"):
            schema = schema.get(name) if isinstance(schema, dict) else None
    return None
