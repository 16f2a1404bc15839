"""Parses an output into reasoning, content and tool calls, while it comes.

The parsers see one character at a time, so what they find does not depend on how the output was cut into chunks. Text
that follows no form is content, as it stands: a tool call is announced once its name and the beginning of its arguments
were read, and until then what was read may still turn out to be content.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """The beginning of a tool call."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON of the latest call's arguments."""

    text: str


Event = Content | Reasoning | Call | Arguments


def merged(events: Iterable[Event]) -> list[Event]:
    """The same, with neighbours of one kind as one event, and no empty texts."""
    found: list[Event] = []
    told = (event for event in events if isinstance(event, Call) or event.text)
    for kind, neighbours in groupby(told, type):
        if kind is Call:
            found += neighbours
        else:
            found.append(kind("".join(each.text for each in neighbours if not isinstance(each, Call))))
    return found


class Parser(Protocol):
    def feed(self, text: str) -> list[Event]:
        """What the text adds."""
        ...

    def finish(self) -> list[Event]:
        """What was held back. Call it when no text follows."""
        ...

    @property
    def in_call(self) -> bool:
        """Whether the latest call has no end yet."""
        ...

    @property
    def in_reasoning(self) -> bool:
        """Whether the latest character belongs to reasoning or its markers."""
        ...


class PlainText:
    """Finds nothing: all is content."""

    in_call = in_reasoning = False

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class Marker:
    """Finds one marker in a text. No marker may contain its own first character twice."""

    def __init__(self, text: str) -> None:
        assert text.count(text[0]) == 1, text
        self.text, self.held = text, ""

    def see(self, character: str) -> str | None:
        """The text that this character shows to be no part of the marker; None if it completes the marker."""
        self.held += character
        if self.text == self.held:
            self.held = ""
            return None
        if self.text.startswith(self.held):
            return ""
        kept = character if character == self.text[0] else ""
        before, self.held = self.held.removesuffix(kept), kept
        return before


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    begin: str
    end: str


class SplitsReasoning:
    """Splits the reasoning off the beginning of an output, and gives the rest to `inner`. White space around the
    opening marker and after the closing one is dropped; before the closing marker it belongs to the reasoning.
    `begun`: the prompt has the opening marker already.
    """

    def __init__(self, form: ReasoningForm, inner: Parser, *, begun: bool) -> None:
        self.inner, self.begin, self.end = inner, form.begin, Marker(form.end)
        # begin, skip, inside, after or content; skip and after drop white space
        self.state = "skip" if begun else "begin"
        self.blank: list[str] = []  # white space before the first marker, or before content
        self.held = ""  # what may be the first marker

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for index, character in enumerate(text):
            if self.state == "content":
                events += self.inner.feed(text[index:])
                break
            self._see(character, events)
        return merged(events)

    def _see(self, character: str, events: list[Event]) -> None:
        if self.state == "begin":
            if character.isspace() and not self.held:
                self.blank.append(character)
                return
            self.held += character
            if self.held == self.begin:
                self.blank, self.held, self.state = [], "", "skip"
            elif not self.begin.startswith(self.held):
                self._leave(events)
        elif self.state == "after":
            if not character.isspace():
                self.held = character
                self._leave(events)
        elif self.state == "inside" or not character.isspace():
            self.state = "inside"
            before = self.end.see(character)
            if before is None:
                self.state = "after"
            else:
                events.append(Reasoning(before))

    def _leave(self, events: list[Event]) -> None:
        self.state = "content"
        events += self.inner.feed("".join(self.blank) + self.held)
        self.blank, self.held = [], ""

    def finish(self) -> list[Event]:
        events: list[Event] = [Reasoning(self.end.held)]
        if self.blank or self.held:
            self._leave(events)
        return merged([*events, *self.inner.finish()])

    @property
    def in_call(self) -> bool:
        return self.inner.in_call

    @property
    def in_reasoning(self) -> bool:
        return self.state in ("skip", "inside")


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a family of models writes tool calls: `begin`, `opening`, one or more objects, `end`."""

    name: str
    begin: str  # empty: an output with calls is nothing but calls
    opening: str  # one character, or none
    separator: str  # one character between two objects, or none
    end: str
    arguments: str  # the key of a call's arguments


ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", "type", "id", *ARGUMENTS)  # of a call's object; an object with another key is no call


class CallObject:
    """Follows the JSON object of a call, one character at a time: its name and its arguments, in any order.

    `names`: the tools that can be called, None for any. `bare`: a call may lack arguments.
    """

    def __init__(self, names: Collection[str] | None, *, bare: bool) -> None:
        self.names, self.bare = names, bare
        self.raw: list[str] = []  # what was read before the call was announced
        self.depth = 0
        self.in_string = self.escaped = False
        self.key: str | None = None  # at depth 1, the key whose value follows
        self.span: list[str] = []  # the key or value at depth 1 that is being read
        self.name: str | None = None
        self.arguments: list[str] = []  # what was read of them and not returned
        self.kind = ""  # the first character of the arguments
        self.complete = False  # whether the arguments are complete
        self.announced = self.ended = False
        self.wrong = False  # it is no call: its text is `raw`

    def see(self, character: str, events: list[Event]) -> None:
        """Take the next character. Look at `ended` and `wrong` afterwards."""
        if not self.announced:
            self.raw.append(character)
        self._follow(character)
        if not self.announced:
            self._announce(events)
        if self.announced and self.arguments:
            events.append(Arguments("".join(self.arguments)))
            self.arguments = []

    def _announce(self, events: list[Event]) -> None:
        if self.ended and not self.kind and self.bare:
            self.kind, self.arguments = "{", ["{", "}"]
        if self.ended and self.kind and self.kind != "{":
            text = unquoted("".join(self.arguments))
            self.kind, self.arguments, self.wrong = "{", [text], self.wrong or not is_object(text)
        if self.wrong or self.name is None or self.kind != "{":
            self.wrong |= self.ended
        elif self.names is not None and self.name not in self.names:
            self.wrong = True
        else:
            self.announced, self.raw = True, []
            events.append(Call(self.name))

    def _follow(self, character: str) -> None:
        if self.in_string:
            self._extend(character)
            self.in_string = self.escaped or character != '"'
            self.escaped = not self.escaped and character == "\\"
        elif character in "{[":
            self.depth += 1
            if self.depth > 1:
                self._extend(character)
        elif character in "}]":
            self.depth -= 1
            if self.depth:
                self._extend(character)
                self.complete |= self.depth == 1 and self.key in ARGUMENTS
            else:
                self._end_value()
                self.ended = True
        elif self.depth > 1:
            self.in_string = character == '"'
            self._extend(character)
        elif character == ":" and self.key is None:
            self.key = decoded("".join(self.span))
            self.span = []
            self.wrong |= self.key not in KEYS
        elif character == ",":
            self._end_value()
        elif not character.isspace():
            self.in_string = character == '"'
            self._extend(character)

    def _extend(self, character: str) -> None:
        if self.key not in ARGUMENTS:
            self.span.append(character)
        elif not self.complete:
            self.kind = self.kind or character
            self.arguments.append(character)

    def _end_value(self) -> None:
        if self.key is None:
            self.wrong |= bool(self.span)
        elif self.key == "name":
            self.name = decoded("".join(self.span))
            self.wrong |= not self.name
        self.complete |= self.key in ARGUMENTS
        self.key, self.span = None, []


def decoded(text: str) -> str | None:
    """The string that a JSON text is; None if it is none, or if it has a lone surrogate and so cannot be sent."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            value.encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def unquoted(arguments: str) -> str:
    """Arguments that are not an object: some models write its JSON as a string, or null for none."""
    text = decoded(arguments)
    return "{}" if arguments == "null" or text == "" else arguments if text is None else text


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class FindsCalls:
    """Finds tool calls in an output. White space around the calls is dropped.

    `names`: the tools that can be called. In a form without a marker, an object that names none of them is content.
    """

    def __init__(self, form: ToolForm, names: Collection[str]) -> None:
        self.form, self.names = form, None if form.begin else names
        self.marker = Marker(form.begin) if form.begin else None
        self.state = "text" if form.begin else "open"  # text, open (before an object), call, after (an object)
        self.opening = form.opening  # what must come before the object
        self.before: list[str] = []  # read in the state open, and perhaps content
        self.held = ""  # read in the state after, and perhaps the form's end
        self.blank: list[str] = []  # white space of the content, which is dropped if a call follows
        self.follows = False  # nothing but white space came since the latest call
        self.call = CallObject(self.names, bare=True)

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for character in text:
            self._see(character, events)
        return merged(events)

    def _see(self, character: str, events: list[Event]) -> None:
        if self.state == "text":
            before = character if self.marker is None else self.marker.see(character)
            if before is None:
                self.before, self.state, self.opening = [self.form.begin], "open", self.form.opening
            else:
                self._content(before, events)
        elif self.state == "open":
            self._open(character, events)
        elif self.state == "call":
            self.call.see(character, events)
            if self.call.wrong and not self.call.announced:
                self._give_up(self.call.raw, events)
            elif self.call.announced:
                self.blank, self.before, self.held, self.follows = [], [], "", True
                if self.call.ended:
                    self.state = "after"
        else:
            self._after(character, events)

    def _open(self, character: str, events: list[Event]) -> None:
        if character.isspace() or (self.opening and character == self.opening):
            self.before.append(character)
            self.opening = self.opening if character.isspace() else ""
        elif character == "{" and not self.opening:
            self.state = "call"
            self.call = CallObject(self.names, bare=bool(self.form.begin))
            self.call.see(character, events)
        else:
            self._give_up([], events)
            self._see(character, events)  # it may begin the next call

    def _after(self, character: str, events: list[Event]) -> None:
        if character.isspace() and not self.held.strip():
            return
        self.held += character
        if self.held == self.form.separator:
            self.before, self.held, self.state = [self.held], "", "open"
        elif self.held == self.form.end:
            self.held, self.state = "", "text"
        elif not self.form.end.startswith(self.held):
            held, self.held, self.state = self.held, "", "text"
            for each in held:  # it may begin the next call
                self._see(each, events)

    def _give_up(self, rest: list[str], events: list[Event]) -> None:
        before, self.before, self.state = self.before, [], "text"
        self._content("".join([*before, *rest]), events)

    def _content(self, text: str, events: list[Event]) -> None:
        if self.follows:
            text = text.lstrip()
        dark = text.rstrip()
        if dark:
            events += [*map(Content, self.blank), Content(dark)]
            self.blank, self.follows = [], False
        self.blank.append(text[len(dark) :])

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self.state == "call" and not self.call.announced:
            self._give_up(self.call.raw, events)
        elif self.state == "open":
            self._give_up([], events)
        elif self.state == "text" and self.marker is not None:
            self._content(self.marker.held, events)
        return merged([*events, *map(Content, self.blank)])

    @property
    def in_call(self) -> bool:
        return self.state == "call" and self.call.announced

    in_reasoning = False
