"""Random protobuf messages, for fuzzing: every field, from what a client may send to what none should."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

KIND = FieldDescriptor
JSON = [
    "",
    "[]",
    "{}",
    "[1]",
    "null",
    "nan",
    '[{"a": 1}]',
    '[{"function": {"name": "f", "arguments": "{"}}]',
    "[" * 5000,
]
GUIDES = ["(a", "[0-9]{1,3}", "start: nothing", 'start: "a"', '{"type": "object"}', '{"type": 3}', '{"$ref": "#"}']
WORDS = ["user", "assistant", "system", "tool", "demo", "lookup", "both", "def main():", "\x00", "€😀", " ", "x" * 3000]
TEXTS = st.one_of(st.sampled_from([*WORDS, *JSON, *GUIDES]), st.text(max_size=20))
REALS = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, 1e300]), st.floats())


def integers(low: int, high: int) -> st.SearchStrategy[int]:
    likely = [value for value in (0, 1, 2, 3, 20, 4095, 4096, 16384, -1) if low <= value <= high]
    return st.one_of(st.sampled_from([*likely, low, high]), st.integers(max(low, -5), 5000), st.integers(low, high))


SCALARS: dict[int, st.SearchStrategy[Any]] = {
    KIND.CPPTYPE_STRING: TEXTS,
    KIND.CPPTYPE_BOOL: st.booleans(),
    KIND.CPPTYPE_DOUBLE: REALS,
    KIND.CPPTYPE_FLOAT: st.floats(width=32),
    KIND.CPPTYPE_UINT32: integers(0, 2**32 - 1),
    KIND.CPPTYPE_UINT64: integers(0, 2**64 - 1),
    KIND.CPPTYPE_INT32: integers(-(2**31), 2**31 - 1),
    KIND.CPPTYPE_INT64: integers(-(2**63), 2**63 - 1),
}


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor) -> Message:
    """A message with some of its fields set, and of a oneof the last one drawn."""
    message = GetMessageClass(descriptor)()
    fields = [*descriptor.fields]
    for field in draw(st.lists(st.sampled_from(fields), max_size=6, unique=True)) if fields else ():
        set_field(draw, message, field)
    return message


def set_field(draw: st.DrawFn, message: Message, field: FieldDescriptor) -> None:
    kind, held = field.message_type, getattr(message, field.name)
    if kind is not None and kind.GetOptions().map_entry:
        keys, values = (SCALARS[part.cpp_type] for part in kind.fields)
        held.update(draw(st.dictionaries(keys, values, max_size=4)))
    elif kind is not None and field.is_repeated:
        held.extend(draw(st.lists(messages(kind), max_size=4)))
    elif kind is not None:
        held.CopyFrom(draw(messages(kind)))
        held.SetInParent()
    elif field.type == KIND.TYPE_BYTES:
        setattr(message, field.name, draw(st.binary(max_size=20)))
    elif field.is_repeated:
        held.extend(draw(st.lists(SCALARS[field.cpp_type], max_size=20)))
    else:
        setattr(message, field.name, draw(SCALARS[field.cpp_type]))
