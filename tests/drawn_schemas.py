"""JSON schemas drawn at random, and random outputs of their grammars.

`python -m tests.drawn_schemas 2000` draws that many schemas and prints what became of them.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator as Validator
from llguidance import LLMatcher, LLTokenizer

from triforce_core.demo import weights_dir
from triforce_core.errors import InvalidValueError
from triforce_core.sampling.compiling import compiled
from triforce_core.sampling.guides import of_json_schema

CLOSING = {b'"', b"}", b"]", b'",', b'"]', b'"}', b"0", b"1", b", "}  # tokens that bring an output nearer to its end
PATTERNS = [
    "^[a-z]{2,5}$",
    '^[^"]{1,4}$',
    r"^[^\\]+$",
    "^[^,;]*$",
    r"^[^\s]{2}$",
    r"^\d{3}-\d{4}$",
    "a",
    "^x|y$",
    r"^\S+@\S+$",
    r"^[\w.-]{1,8}$",
    "^(foo|bar)+$",
    r"^[^\"\\]*$",
    "^.{0,3}$",
    r"^\\$",
]
NAMES = ["a", "b", "name", "x-1", "ü", 'q"', "a b", "\\", "id", "b1"]
FORMATS = ["date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "uri", "duration", "hostname", "zip", "phone"]


def drawn(rng: random.Random, depth: int = 2) -> Any:
    """A schema."""
    kinds = [string, integer, number, constant, boolean, string, integer]
    if depth:
        kinds += [array, object_, object_, union, object_, merged]
    schema = rng.choice(kinds)(rng, depth)
    if rng.random() < 0.1:
        schema |= rng.choice(
            [{"title": "T"}, {"description": "d"}, {"default": None}, {"deprecated": True}, {"x-y": 1}]
        )
    return schema


def string(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    roll = rng.random()
    if roll < 0.35:
        schema["pattern"] = rng.choice(PATTERNS)
    elif roll < 0.6:
        schema["format"] = rng.choice(FORMATS)
    elif roll < 0.8:
        schema |= {"minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 20)}
    return schema


def integer(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    scale = rng.choice([1, 10, 1000, 10**6, 10**6, 2**53, 2**62])
    low = rng.randint(-scale, scale)
    if rng.random() < 0.6:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(40, 2000) * max(1, scale // 1000)
    if rng.random() < 0.2:
        schema["multipleOf"] = rng.choice([1, 2, 3, 5, 7, 10])
    return schema


def number(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "number"}
    low = rng.choice([rng.randint(-9, 9), rng.uniform(-1, 1), rng.uniform(-1e6, 1e6), 1e-7, 0.1])
    if rng.random() < 0.6:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.6:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.choice([1, 0.5, 1e-3, 1e9])
    return schema


def constant(rng: random.Random, depth: int) -> dict[str, Any]:
    values = [
        "a",
        'say "x"',
        "ü\n",
        "\\",
        7,
        -3,
        0,
        1.5,
        0.1,
        1e-9,
        12345678901,
        2**53 - 1,
        True,
        None,
        [1, "a"],
        {"k": 2},
    ]
    if rng.random() < 0.1:
        values = [2**53 + 1, 1234567890123456789, -(2**60) - 1]
    some = rng.sample(values, rng.randint(1, 3))
    return {"const": some[0]} if rng.random() < 0.4 else {"enum": some}


def boolean(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def array(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    if rng.random() < 0.8:
        schema["items"] = drawn(rng, depth - 1)
    if rng.random() < 0.3:
        schema["prefixItems"] = [drawn(rng, depth - 1) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.7:
        low = rng.randint(0, 2)
        schema |= {"minItems": low, "maxItems": low + rng.randint(0, 3)}
    if rng.random() < 0.15:
        schema = {
            "type": "array",
            "items": {"enum": rng.sample(["a", 1, True, None, 0.5, [1]], 4)},
            "uniqueItems": True,
        }
        schema["maxItems"] = rng.randint(1, 4)
    return schema


def object_(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: drawn(rng, depth - 1) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.6]
    roll = rng.random()
    if roll < 0.5:
        schema["additionalProperties"] = False
    elif roll < 0.65:
        schema["additionalProperties"] = drawn(rng, 0)
    if rng.random() < 0.15:
        schema["patternProperties"] = {rng.choice(["^b", "^[a-z]$", "^x-", "a", '^[^"]$', "^q"]): drawn(rng, 0)}
    if rng.random() < 0.1:
        schema["minProperties"] = rng.randint(0, 2)
    if rng.random() < 0.1:
        rule = rng.choice([{"enum": NAMES[:5]}, {"pattern": "^[a-z]"}, {"minLength": 2}, {"maxLength": 3}, {}])
        free = {"properties": {}, "required": [], "additionalProperties": drawn(rng, 0)}
        schema = {"type": "object", "propertyNames": rule, **free}
    return schema


def union(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.3:
        tagged = [object_(rng, depth) for _ in range(2)]
        for kind, branch in enumerate(tagged):
            branch["properties"] = {"kind": {"const": kind}, **branch["properties"]}
            branch["required"].append("kind")
        return {"oneOf": tagged}
    return {"anyOf": [drawn(rng, depth - 1) for _ in range(rng.randint(1, 3))]}


def merged(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"$ref": "#/$defs/node"}
    return {"allOf": [object_(rng, depth), {"type": "object", "properties": {"z": drawn(rng, 0)}}]}


NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
    "required": ["v"],
    "additionalProperties": False,
}


def schemas(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    for number_ in range(count):
        schema = drawn(random.Random(f"{seed} {number_}"))
        yield (
            {**schema, "$defs": {"node": {**NODE, "additionalProperties": False}}} if "$defs" not in schema else schema
        )


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer((weights_dir("target") / "tokenizer.json").read_text(), n_vocab=4096, eos_token=0)


@cache
def texts() -> list[bytes]:
    return [tokenizer().decode_bytes([token]) for token in range(4096)]


@cache
def closing() -> set[int]:
    return {token for token, text in enumerate(texts()) if text in CLOSING}


def sampled(beginning: LLMatcher, rng: random.Random, max_tokens: int = 120) -> bytes | None:
    """A random output; None if it is not complete after `max_tokens`."""
    matcher, output = beginning.deep_copy(), b""
    for _ in range(max_tokens):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise AssertionError(f"after {output!r}: {matcher.get_error()[:300]}")
        allowed = np.unpackbits(bits, bitorder="little").nonzero()[0].tolist()
        if allowed[0] == 0:
            if len(allowed) == 1 or rng.random() < 0.5:
                return output
            allowed = allowed[1:]
        ends = [token for token in allowed if token in closing()] if rng.random() < 0.6 else []
        token = rng.choice(ends or allowed)
        assert matcher.consume_token(token), f"{texts()[token]!r} was allowed after {output!r}"
        output += texts()[token]
    return None


def outcomes(count: int, seed: int = 0, outputs: int = 3) -> Iterator[tuple[str, dict[str, Any], str]]:
    """What became of each schema and output: ("refused", schema, why), ("cut", …), ("valid", …) or ("wrong", …)."""
    for schema in schemas(count, seed):
        try:
            matcher = compiled(tokenizer(), of_json_schema(json.dumps(schema)))
            error = matcher.get_error()
        except InvalidValueError as refusal:
            error = refusal.rule
        yield ("refused" if error else "accepted", schema, error)
        rng = random.Random(0)
        check = Validator(schema, format_checker=Validator.FORMAT_CHECKER)
        for _ in range(0 if error else outputs):
            try:
                output = sampled(matcher, rng)
                faults = [] if output is None else [str(each.message) for each in check.iter_errors(json.loads(output))]
            except (AssertionError, ValueError) as fault:
                output, faults = b"", [str(fault)]
            yield ("wrong" if faults else "cut" if output is None else "valid", schema, f"{output!r} {faults}")


if __name__ == "__main__":
    found: Counter[str] = Counter()
    for outcome, schema, shown in outcomes(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0):
        found[outcome] += 1
        if outcome in ("wrong", "refused"):
            print(outcome, shown[:300], json.dumps({k: v for k, v in schema.items() if k != "$defs"})[:400])
    print(dict(found))
