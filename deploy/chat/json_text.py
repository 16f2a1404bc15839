"""Follows the text of one JSON object strictly, one character at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

STRING, NUMBER, WORD = '"', "-0123456789", "tfn"
VALUE = f"{STRING}{NUMBER}{WORD}{{["  # the characters that may begin a value
SPACE = " \t\n\r"
UNQUOTED = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
UNQUOTED_CHARACTERS = frozenset("+-.0123456789Eaeflnrstu")


class NoCall(Exception):
    """What was read is no call. `rest`: its last characters, which may begin something else."""

    def __init__(self, rest: str = "") -> None:
        super().__init__(rest)
        self.rest = rest


class JsonObject:
    """The object so far, and the places of its own members' values.

    `keys`: the only ones that its own members may have, None for any.
    """

    def __init__(self, keys: Collection[str] | None = None) -> None:
        self.keys = keys
        self.characters: list[str] = []
        self.expected = "{"  # the characters that may come next, besides white space, outside strings and other words
        self.open: list[str] = []  # brackets
        self.string = False
        self.escape = ""  # as far as it was read
        self.begin: int | None = None  # of the string, number or word that is being read
        self.key = ""
        self.members: dict[str, tuple[int, int | None]] = {}  # where each value begins and ends
        self.ended = False

    def see(self, character: str) -> None:
        """Take the next character. Raises `NoCall` with it if the text is not JSON, or has a key that it may not."""
        place = len(self.characters)
        self.characters.append(character)
        if self.string:
            self._in_string(character)
        elif self.begin is not None and character in UNQUOTED_CHARACTERS:
            return
        else:
            if self.begin is not None:
                require(UNQUOTED.fullmatch(self.text(self.begin, place)) is not None, character)
                self._end_value(place)
            if character not in SPACE:
                require(character in self.expected, character)
                self._structure(character, place)

    def _structure(self, character: str, place: int) -> None:
        if character in VALUE and self.expected.startswith(VALUE) and len(self.open) == 1:
            self.members[self.key] = (place, None)
        if character in "{[":
            self.open.append(character)
            self.expected = f"{STRING}}}" if character == "{" else f"{VALUE}]"
        elif character in "}]":
            self.open.pop()
            self._end_value(place + 1)
        elif character == ":":
            self.expected = VALUE
        elif character == ",":
            self.expected = STRING if self.open[-1] == "{" else VALUE
        else:
            self.begin, self.string = place, character == STRING

    def _in_string(self, character: str) -> None:
        if self.escape:
            self.escape += character
            if len(self.escape) == 2:
                require(character in '"\\/bfnrtu', character)
                self.escape = self.escape if character == "u" else ""
            else:
                require(character in "0123456789abcdefABCDEF", character)
                self.escape = "" if len(self.escape) == 6 else self.escape
        elif character == "\\":
            self.escape = character
        elif character == STRING:
            self.string = False
            if self.expected.startswith(VALUE):
                self._end_value(len(self.characters))
            else:
                self._end_key()
        else:
            require(character >= " ", character)

    def _end_key(self) -> None:
        assert self.begin is not None
        if len(self.open) == 1:
            self.key = json.loads(self.text(self.begin))
            require(self.keys is None or self.key in self.keys, STRING)
        self.begin, self.expected = None, ":"

    def _end_value(self, place: int) -> None:
        self.begin, self.ended = None, not self.open
        if self.open:
            self.expected = ",}" if self.open[-1] == "{" else ",]"
        if len(self.open) == 1:
            self.members[self.key] = (self.members[self.key][0], place)

    def text(self, begin: int = 0, end: int | None = None) -> str:
        return "".join(self.characters[begin:end])

    def member(self, key: str) -> str | None:
        """The JSON of a value, as far as it was read; None if it did not begin."""
        return self.text(*self.members[key]) if key in self.members else None

    def complete(self, key: str) -> bool:
        return key in self.members and self.members[key][1] is not None


def require(sound: bool, character: str) -> None:
    if not sound:
        raise NoCall(character)


def is_object(text: str) -> bool:
    """Whether the text is one JSON object."""
    follows = JsonObject()
    try:
        for character in text.strip(SPACE):
            require(not follows.ended, character)
            follows.see(character)
    except NoCall:
        return False
    return follows.ended
