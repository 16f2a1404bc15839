"""How families of models write tool calls: three general forms, each with what reads it and with its grammar.

A form is read by a generator that gets the text one character at a time and raises `NoCall` once it cannot be a call. A
call is told when its arguments are complete: only then is it known that they are JSON. Text that turned out to be no
call could not be taken back from a stream that had announced one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from deploy.chat.json_text import JsonObject, NoCall, is_object
from deploy.chat.values import (
    TEXT,
    JsonValue,
    Value,
    Words,
    definitions_of,
    json_of,
    parameters_of,
    property_of,
    quoted,
    types_of,
)
from triforce_core.sampling.guides import JSON_STYLE
from triforce_core.sampling.schemas import kept

T = TypeVar("T")
Reads = Generator[None, str, T]
Found = tuple[str, str]  # a call's name and its arguments in JSON
NAME = re.compile(r"[A-Za-z0-9_.:-]")
KEYS = ("name", "type", "id", "arguments", "parameters")  # of a call's object; an object with another key is no call


class Characters:
    """The characters of one or more calls as they come."""

    def __init__(self) -> None:
        self.back = ""  # the latest character, where it is to be read again
        self.call: Found | None = None  # complete with the latest character
        self.cut: Callable[[], Found | None] = lambda: None  # the call that is being read, as far as it came
        self.closes = False  # what is being read only ends a call that was told

    def next(self) -> Reads[str]:
        character, self.back = self.back, ""
        return character or (yield)

    def solid(self) -> Reads[str]:
        """The next character that is no white space."""
        while (character := (yield from self.next())).isspace():
            pass
        return character

    def literal(self, *texts: str) -> Reads[str]:
        """Whichever of the texts comes next. White space before it does not matter, nor at its own ends."""
        stripped = [text.strip() for text in texts]
        held = yield from self.solid()
        while held not in stripped:
            if not any(text.startswith(held) for text in stripped):
                raise NoCall(held)
            held += yield from self.next()
        return texts[stripped.index(held)]

    def literals(self, texts: Sequence[str]) -> Reads[None]:
        for text in texts:
            yield from self.literal(text)

    def name(self) -> Reads[str]:
        found, character = [], (yield from self.solid())
        while NAME.fullmatch(character):
            found.append(character)
            character = yield from self.next()
        if not found:
            raise NoCall(character)
        self.back = character
        return "".join(found)

    def until(self, end: str, held: list[str]) -> Reads[None]:
        """What comes before `end` goes into `held`."""
        marker = Markers(end)
        while (before := marker.see((yield from self.next()))) is not None:
            held.append(before)

    def object(self, follows: JsonObject) -> Reads[None]:
        follows.see((yield from self.solid()))
        while not follows.ended:
            follows.see((yield from self.next()))

    def tell(self, call: Found | None) -> None:
        """A call is complete; None: it turned out to be none."""
        if call is None:
            raise NoCall
        self.call, self.cut, self.closes = call, lambda: None, True


class Markers:
    """Finds the first of some markers in a text. None may contain the first character of one further on, or begin as
    another one is.
    """

    def __init__(self, *texts: str) -> None:
        self.texts, self.held, self.found = texts, "", ""
        self.firsts = {text[0] for text in texts}
        assert not any(first in text[1:] for text in texts for first in self.firsts), texts

    def see(self, character: str) -> str | None:
        """The text that this character shows to be no part of a marker; None if it completes the marker `found`."""
        self.held += character
        if self.held in self.texts:
            self.found, self.held = self.held, ""
            return None
        if any(text.startswith(self.held) for text in self.texts):
            return ""
        kept_back = character if character in self.firsts else ""
        before, self.held = self.held.removesuffix(kept_back), kept_back
        return before


class Written:
    """The grammar of texts that are to come as they stand. `ids`: the markers in them that are tokens of their own.

    Where two texts can follow, neither may begin as the other one does and end sooner, unless it is followed by what
    tells them apart at once: the library reads the longer one as far as it goes, and does not turn back.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        longest_first = sorted(ids, key=len, reverse=True)
        self.split = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if ids else None

    def __call__(self, text: str) -> str:
        parts = self.split.split(text) if self.split else [text]
        return " ".join(f"<[{self.ids[part]}]>" if part in self.ids else quoted(part) for part in parts if part)


class CallForm(Protocol):
    """How a family of models writes tool calls. Texts have the white space that its template writes."""

    @property
    def begin(self) -> str:
        """What calls begin with; empty: an output with calls is nothing but calls."""
        ...

    @property
    def around(self) -> tuple[str, ...]:
        """What may stand around calls, and means as little as white space."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that are special tokens of some models."""
        ...

    def read(self, text: Characters, tools: Mapping[str, Any]) -> Reads[None]:
        """Read what follows `begin`. `tools`: the schema of the arguments by the name of the tool."""
        ...

    def rules(self, tools: Sequence[Mapping[str, Any]], written: Written, several: bool) -> list[str]:
        """The rules of a grammar, of which `calls` is one call of these functions, or more if `several`. Raises
        `InvalidValueError` for functions whose calls cannot be kept to their schemas.
        """
        ...


@dataclass(frozen=True, slots=True)
class ObjectCalls:
    """`begin`, `opening`, one or more objects that hold names and arguments, `end`."""

    begin: str
    opening: str
    separator: str  # between two objects; none: there is one
    end: str
    arguments: str = "arguments"  # their key
    newline: str = ""  # around the object
    around: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(text for text in (self.begin, self.end) if text)

    def read(self, text: Characters, tools: Mapping[str, Any]) -> Reads[None]:
        if self.opening:
            yield from text.literal(self.opening)
        ends = [end for end in (self.separator, self.end) if end]
        while True:
            follows = JsonObject(KEYS)
            text.cut, text.closes = partial(self._call, follows, tools), False
            yield from text.object(follows)
            text.tell(self._call(follows, tools))
            if not ends or (yield from text.literal(*ends)) != self.separator:
                return

    def _call(self, follows: JsonObject, tools: Mapping[str, Any]) -> Found | None:
        name = string(follows.member("name")) if follows.complete("name") else None
        key = "arguments" if "arguments" in follows.members else "parameters"
        arguments = follows.member(key)
        if arguments is None:
            arguments = "{}" if self.begin and follows.ended else None
        elif not arguments.startswith("{"):
            arguments = unquoted(arguments) if follows.ended else None
        if not name or arguments is None or (not self.begin and name not in tools):
            return None
        return name, arguments

    def rules(self, tools: Sequence[Mapping[str, Any]], written: Written, several: bool) -> list[str]:
        rules = alternatives(tools, lambda tool: f"%json {styled(self._schema(tool))}")
        more = f' ("{self.separator} " call)*' if several and self.separator else ""
        inside = " ".join([written(self.opening + self.newline), f"call{more}", written(self.newline)])
        again = ' ("\\n" one)*' if several and self.begin and not self.separator else ""
        return [*rules, f"one: {written(self.begin)} {inside} {written(self.end)}", f"calls: one{again}"]

    def _schema(self, function: Mapping[str, Any]) -> dict[str, Any]:
        arguments = arguments_schema(function)
        return definitions_of(arguments, function["name"]) | {  # references are resolved from the top
            "type": "object",
            "properties": {"name": {"const": function["name"]}, self.arguments: arguments},
            "required": ["name", self.arguments],
            "additionalProperties": False,
        }


def string(text: str | None) -> str | None:
    """The string that a JSON text is; None if it is none, or if it has a lone surrogate and so cannot be sent."""
    try:
        value = json.loads(text or "null")
        if isinstance(value, str):
            value.encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def unquoted(arguments: str) -> str | None:
    """Arguments that are not an object: some models write its JSON as a string, or null for none."""
    text = string(arguments)
    if arguments == "null" or text == "":
        return "{}"
    return text if text is not None and is_object(text) else None


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """`begin`, `before`, a name, `between`, its arguments in JSON, `after`."""

    begin: str
    before: tuple[str, ...]
    between: tuple[str, ...]
    after: tuple[str, ...]
    number: str = ""  # what separates the name from the call's number
    note: str = ""  # what may begin an identifier after the name
    first: str = ""  # before the first call
    last: str = ""  # after the last one
    next: str = ""  # between two calls

    @property
    def around(self) -> tuple[str, ...]:
        return tuple(text for text in (self.first, self.last) if text)

    @property
    def markers(self) -> tuple[str, ...]:
        parts = (self.begin, *self.before, *self.between, *self.after, self.note, *self.around)
        return tuple(text.strip() for text in parts if text)

    def read(self, text: Characters, tools: Mapping[str, Any]) -> Reads[None]:
        yield from text.literals(self.before)
        name = yield from text.name()
        if self.number:
            name = name.rpartition(self.number)[0] or name
        if self.note and (yield from text.literal(self.note, self.between[0])) == self.note:
            yield from text.name()
            yield from text.literals(self.between)
        else:
            yield from text.literals(self.between[1:] if self.note else self.between)
        follows = JsonObject()
        text.cut = lambda: (name, follows.text().lstrip()) if follows.open else None
        yield from text.object(follows)
        text.tell((name, follows.text().lstrip()))
        yield from text.literals(self.after)

    def rules(self, tools: Sequence[Mapping[str, Any]], written: Written, several: bool) -> list[str]:
        before, between, after = ("".join(texts) for texts in (self.before, self.between, self.after))
        number = f' "{self.number}" /[0-9]+/' if self.number else ""

        def call(tool: Mapping[str, Any]) -> str:
            head = f"{written(before + tool['name'])}{number} {written(between)}"
            return f"{head} %json {styled(arguments_schema(tool))}"

        again = f" ({written(self.next)} one)*" if several else ""
        return [
            *alternatives(tools, call),
            f"one: {written(self.begin)} call {written(after)}",
            f"calls: {written(self.first)} one{again} {written(self.last)}",
        ]


@dataclass(frozen=True, slots=True)
class ParameterCalls:
    """`begin`, a name, `named`, any number of parameters, `end`. A parameter is `key`, a key, `keyed`, perhaps `value`,
    its value and `valued`. Values that are strings stand as they are, others are JSON.
    """

    begin: str
    named: str
    key: str
    keyed: str
    value: str
    valued: str
    end: str
    first: str = ""  # before the first call
    last: str = ""  # after the last one
    next: str = ""  # between two calls

    @property
    def around(self) -> tuple[str, ...]:
        return tuple(text.strip() for text in (self.first, self.last) if text)

    @property
    def markers(self) -> tuple[str, ...]:
        parts = (self.begin, self.key, self.keyed, self.value, self.valued, self.end, *self.around)
        return tuple(text.strip() for text in parts if text)

    def read(self, text: Characters, tools: Mapping[str, Any]) -> Reads[None]:
        name = yield from text.name()
        if self.named.strip():
            yield from text.literal(self.named)
        schema, values, key, held = tools.get(name), dict[str, str](), list[str](), list[str]()
        while (yield from text.literal(self.key, self.end)) == self.key:
            if name in tools:  # otherwise it may be a text about calls that ends here
                text.cut = lambda: (name, self._cut(values, "".join(key), "".join(held), schema))
            yield from text.until(self.keyed.strip(), key)
            if self.value:
                yield from text.literal(self.value)
            yield from self._read_value(text, held, types_of(property_of(schema, "".join(key)), schema))
            values["".join(key)] = json_of(self._value("".join(held)), schema, "".join(key))
            key.clear()
            held.clear()
        text.tell((name, written_out(values)))

    def _read_value(self, text: Characters, held: list[str], types: frozenset[str]) -> Reads[None]:
        """A value up to what ends it. In a string within a list or an object, this is text."""
        seen, follows = 0, JsonObject()
        for character in '{"":':
            follows.see(character)
        while True:
            yield from text.until(self.valued.strip(), held)
            if "string" in types:
                return
            try:
                for character in "".join(held[seen:]):
                    follows.see(character)
            except NoCall:
                return
            if not follows.string or len(follows.open) == 1:
                return
            seen = len(held)
            held.append(self.valued.strip())

    def _cut(self, values: Mapping[str, str], key: str, held: str, schema: Any) -> str:
        """The arguments as far as they came: whole values, and the beginning of a string."""
        is_text = bool(held) and types_of(property_of(schema, key), schema) == TEXT
        begun = {key: quoted(self._value(held))} if is_text else {}
        whole = {name: value for name, value in values.items() if name not in begun}
        return written_out(whole | begun)[: -2 if begun else -1]

    def _value(self, text: str) -> str:
        """The text without the newlines that the template writes around it."""
        newline = self.valued[: -len(self.valued.lstrip())]
        return text.removeprefix(newline).removesuffix(newline) if newline else text

    def rules(self, tools: Sequence[Mapping[str, Any]], written: Written, several: bool) -> list[str]:
        more: list[str] = []

        def call(tool: Mapping[str, Any]) -> str:
            index = tools.index(tool)
            parameters = parameters_of(tool, self.keyed.strip(), self.valued.strip())
            for number, (key, _, value) in enumerate(parameters):
                begin = written(self.key + key + self.keyed + self.value)
                more.append(
                    f"of_{index}_{number}: {begin} {self._rule(f'TEXT_{index}_{number}', value, written, more)}"
                )
            all_of_them = " ".join(
                f"of_{index}_{number}{'' if needed else '?'}" for number, (_, needed, _) in enumerate(parameters)
            )
            return f"{written(tool['name'] + self.named)} {all_of_them} {written(self.end)}"

        again = f" ({written(self.next)} one)*" if several else ""
        return [
            *alternatives(tools, call),
            *more,
            f"one: {written(self.begin)} call",
            f"calls: {written(self.first)} one{again} {written(self.last)}",
        ]

    def _rule(self, name: str, value: Value, written: Written, more: list[str]) -> str:
        """The rule of a value and what ends it; `name` is that of a terminal, which goes to `more`."""
        if isinstance(value, JsonValue):
            return f"%json {styled(value.schema)} {written(self.valued)}"
        space, tag, _ = self.valued.partition(self.valued.strip())
        end = space if tag in written.ids else space + tag
        if isinstance(value, Words):
            return (
                f"({' | '.join(quoted(text + end) for text in value.texts)}) {written(self.valued.removeprefix(end))}"
            )
        text = f"(/(?s:.{{{value.least},{value.most}}})/ & ~/(?s:.*){escaped(tag)}(?s:.*)/)"
        more.append(f"{name}: {text} {quoted(end) if end else ''}")
        return f"{name} {written(self.valued.removeprefix(end))}"


class ChannelCalls:
    """A call is a message to a function, in the channel `commentary`; an answer has one."""

    markers = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")

    def rules(self, tools: Sequence[Mapping[str, Any]], written: Written, several: bool) -> list[str]:
        def call(tool: Mapping[str, Any]) -> str:
            to = f"to=functions.{tool['name']}"
            headers = (
                f" {to}<|channel|>commentary json<|message|>",
                f"<|channel|>commentary {to} <|constrain|>json<|message|>",
            )
            return f"({' | '.join(map(written, headers))}) %json {styled(arguments_schema(tool))}"

        return [*alternatives(tools, call), "calls: call"]


def written_out(values: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{quoted(key)}: {value}" for key, value in values.items()) + "}"


def alternatives(tools: Sequence[Mapping[str, Any]], call: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """The rule `call`: a call of one of the functions."""
    return [
        f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}",
        *(f"call_{index}: {call(tool)}" for index, tool in enumerate(tools)),
    ]


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**(function.get("parameters") or {}), "type": "object"}


def styled(schema: Any) -> str:
    return json.dumps({**kept(schema), "x-guidance": JSON_STYLE} if isinstance(schema, dict) else schema)


def escaped(text: str) -> str:
    """The text in a regular expression between slashes."""
    return re.sub(r"([][/\\(){}.*+?|^$])", r"\\\1", text).replace("\n", "\\n")
