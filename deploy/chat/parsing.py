"""Parses an output into reasoning, content and tool calls, while it comes.

The parsers see one character at a time, so what they find does not depend on how the output was cut into chunks. Text
that follows no form is content, as it stands: a tool call is told once it is complete, because until then what was read
may still turn out to be content. Only of an output that ends within a call is the call told as far as it came.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from deploy.chat.forms import CallForm, Characters, Found, Markers, Reads
from deploy.chat.json_text import JsonObject, NoCall


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
        """Whether the output ended within a call."""
        ...

    @property
    def in_reasoning(self) -> bool:
        """Whether the latest character is known to be reasoning, or to complete a marker around it."""
        ...


class PlainText:
    """Finds nothing: all is content."""

    in_call = in_reasoning = False

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


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
        self.inner, self.begin, self.end = inner, form.begin, Markers(form.end)
        # begin, skip, inside, after or content; skip and after drop white space
        self.state = "skip" if begun else "begin"
        self.blank: list[str] = []  # white space before the first marker, or before content
        self.held = ""  # what may be the first marker
        self.in_reasoning = False

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for index, character in enumerate(text):
            if self.state == "content":
                self.in_reasoning = False
                events += self.inner.feed(text[index:])
                break
            self._see(character, events)
        return merged(events)

    def _see(self, character: str, events: list[Event]) -> None:
        before = self.state
        self._follow(character, events)
        self.in_reasoning = self.state in ("skip", "inside") or before in ("skip", "inside")

    def _follow(self, character: str, events: list[Event]) -> None:
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


class FindsCalls:
    """Finds tool calls in an output. White space around the calls is dropped, and what the form has around them.

    `tools`: the schemas of the arguments of the tools that can be called, by name.
    """

    in_reasoning = False

    def __init__(self, form: CallForm, tools: Mapping[str, Any]) -> None:
        self.form, self.tools = form, tools
        self.markers = Markers(form.begin, *form.around) if form.begin else None
        self.reading: Characters | None = None  # where no call is being read
        self.reads: Reads[None]
        self.raw: list[str] = []  # what was read since the call's beginning, or since the latest call of a list
        self.blank: list[str] = []  # what is dropped if a call follows, and else content
        self.follows = False  # nothing else came since the latest call
        self.in_call = False
        if not form.begin:
            self._begin("")

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for character in text:
            self._see(character, events)
        return merged(events)

    def _begin(self, marker: str) -> None:
        self.raw, self.reading = [marker], Characters()
        self.reads = self.form.read(self.reading, self.tools)
        next(self.reads)

    def _see(self, character: str, events: list[Event]) -> None:
        if self.reading is not None:
            self._read(character, self.reading, events)
            return
        before = character if self.markers is None else self.markers.see(character)
        if before is not None:
            self._content(before, events)
        elif self.markers is not None and self.markers.found == self.form.begin:
            self._begin(self.form.begin)
        elif self.markers is not None and not (self.follows and self.markers.found == self.form.around[-1]):
            self.blank.append(self.markers.found)

    def _read(self, character: str, reading: Characters, events: list[Event]) -> None:
        self.raw.append(character)
        wrong: NoCall | None = None
        try:
            self.reads.send(character)
        except StopIteration:
            self.reading = None
        except NoCall as error:
            wrong, self.reading = error, None
        if reading.call is not None:
            self._tell(reading.call, events)
            reading.call = None
        elif wrong is not None:
            raw, self.raw = "".join(self.raw), []
            self._content(raw.removesuffix(wrong.rest), events)
            for each in wrong.rest:  # it may begin the next call
                self._see(each, events)

    def _tell(self, call: Found, events: list[Event]) -> None:
        events += [Call(call[0]), Arguments(call[1])]
        self.raw, self.blank, self.follows = [], [], True

    def _content(self, text: str, events: list[Event]) -> None:
        if self.follows and not self.blank:
            text = text.lstrip()
        dark = text.rstrip()
        if dark:
            events += [*map(Content, self.blank), Content(dark)]
            self.blank, self.follows = [], False
        if space := text[len(dark) :]:
            self.blank.append(space)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self.reading is not None:
            call = self.reading.cut()
            if call is not None:
                self.in_call = True
                self._tell(call, events)
            elif not self.reading.closes:
                self._content("".join(self.raw), events)
        elif self.markers is not None and not self._ends_calls(self.markers.held):
            self._content(self.markers.held, events)
        return merged([*events, *([] if self.follows else map(Content, self.blank))])

    def _ends_calls(self, held: str) -> bool:
        """Whether this is the beginning of what stands after calls."""
        return self.follows and any(text.startswith(held) for text in self.form.around)


# The text before a message; its end may be missing where the output ends.
HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?\s*(?:to=(?P<to>[^\s<]+)\s*)?"
    r"(?:<\|channel\|>\s*(?P<channel>\w*)\s*(?:to=(?P<recipient>[^\s<]+)\s*)?(?:<\|constrain\|>\s*)?\w*)?"
)
HEADER_BEGINS = ("<|start|>", "<|channel|>", "assistant", "to=")
CHANNELS = {"analysis": "reasoning", "commentary": "content", "final": "content"}
FUNCTIONS = "functions."


def begins_message(raw: str) -> bool:
    """Whether this is a header, which has its end, or a known channel, still to come."""
    found = HEADER.fullmatch(raw)
    return found is not None and any(name.startswith(found["channel"] or "") for name in CHANNELS)


class FindsChannels:
    """Reads an output that is a sequence of messages, each with a header that names its channel. Analysis is reasoning,
    a message to a function is a call of it, and the others are content. What is none of these is content, its header
    included.

    `tools`: the tools that can be called. `begun`: the prompt has the header of an analysis already.
    """

    def __init__(self, tools: Mapping[str, Any], *, begun: bool) -> None:
        self.tools = tools
        self.markers = Markers("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
        self.state = "reasoning" if begun else "header"  # or call, or content
        self.raw: list[str] = []  # of a header, or of a call with its header
        self.begun = ""  # the first characters of a header
        self.name = ""
        self.arguments = JsonObject()
        self.in_call = self.in_reasoning = False

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for character in text:
            state, before = self.state, self.markers.see(character)
            if before is None:
                self._mark(self.markers.found, events)
            else:
                self._text(before, events)
            self.in_reasoning = "reasoning" in (state, self.state)
        return merged(events)

    def _mark(self, marker: str, events: list[Event]) -> None:
        if marker != "<|message|>":
            self._give_up(events)
            self.begun = marker if marker == "<|start|>" else ""
            self.state, self.raw = "header", [self.begun]
        elif self.state == "header":
            self._begin(events)
        else:
            self._text(marker, events)

    def _begin(self, events: list[Event]) -> None:
        """A message begins after its header."""
        found = HEADER.fullmatch("".join(self.raw).strip())
        to = found and (found["to"] or found["recipient"])
        state = CHANNELS.get(found["channel"] or "") if found else None
        self.raw.append("<|message|>")
        if state and to and to.startswith(FUNCTIONS) and self.tools:
            self.state, self.name, self.arguments = "call", to.removeprefix(FUNCTIONS), JsonObject()
        elif state and not to:
            self.state, self.raw = state, []
        else:
            self._give_up(events)

    def _text(self, text: str, events: list[Event]) -> None:
        if self.state == "reasoning":
            events.append(Reasoning(text))
        elif self.state == "content":
            events.append(Content(text))
        else:
            self.raw.append(text)
            if self.state == "call":
                self._follow(text, events)
            else:
                self.begun = (self.begun + text).lstrip()[: len("<|channel|>")]
                if not any(each.startswith(self.begun) or self.begun.startswith(each) for each in HEADER_BEGINS):
                    self._give_up(events)

    def _follow(self, text: str, events: list[Event]) -> None:
        try:
            for character in text:
                self.arguments.see(character)
        except NoCall:
            self._give_up(events)
        if self.arguments.ended:
            self._tell(events)

    def _tell(self, events: list[Event]) -> None:
        events += [Call(self.name), Arguments(self.arguments.text().lstrip())]
        self.state, self.raw, self.begun = "header", [], ""

    def _give_up(self, events: list[Event]) -> None:
        """What was read and not told is content."""
        events.append(Content("".join(self.raw)))
        self.state, self.raw = "content", []

    def finish(self) -> list[Event]:
        events: list[Event] = []
        self._text(self.markers.held, events)
        raw = "".join(self.raw)
        if self.state == "call" and self.arguments.open:
            self.in_call = True
            self._tell(events)
        elif not (raw.startswith("<|") and self.state == "header" and begins_message(raw)):
            self._give_up(events)
        return merged(events)
