"""Guides: the forms that a client can ask an output to have, and their grammars as llguidance writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, grammar_from

from triforce_core.errors import InvalidValueError, require
from triforce_core.sampling.schemas import kept, whole

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARACTERS = 256 * 1024
MAX_CHOICES = 1024
LARK = re.compile(r"^[ \t]*[?!]*start(\.\d+)?[ \t]*:", re.MULTILINE)  # llguidance knows no sign before the name


# JSON as Python's json.dumps writes it. No character is written as \u…: the library would not notice that such a key is
# one of the declared keys.
JSON_STYLE: JsonCompileOptions = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
}


def of_json_schema(schema: str) -> str:
    """The grammar of JSON texts that are valid under a JSON schema, which is given as JSON."""
    return checked("json_schema", schema, lambda: json_grammar(parsed(schema)))


def of_json_object(wanted: bool) -> str:
    """The grammar of any JSON object."""
    require(wanted, "json_object", wanted, "must be true, or left out")
    return json_grammar({"type": "object"})


def of_regex(regex: str) -> str:
    """The grammar of the texts that match a regular expression as a whole."""
    return checked("regex", regex, lambda: LLMatcher.grammar_from_regex(whole(regex)))


def of_choice(choices: Sequence[str]) -> str:
    """The grammar of these texts."""
    require(0 < len(choices) <= MAX_CHOICES, "choice", len(choices), f"must be 1 to {MAX_CHOICES} texts")
    require(all(choices), "choice", "", "must not hold an empty text")
    return checked("choice", "".join(choices), lambda: grammar_from("choice", json.dumps([*choices])))


def of_ebnf(grammar: str) -> str:
    """The grammar that a text in EBNF describes: as for Lark (`start: …`) or for llama.cpp (`root ::= …`)."""
    # The library takes time with the square of the number of empty lines.
    grammar = "\n".join(line for line in grammar.splitlines() if line.strip())
    return checked("grammar", grammar, lambda: grammar_from("lark" if LARK.search(grammar) else "ebnf", grammar))


def of_composed(grammar: str) -> str:
    """A grammar as the library keeps it, which was composed of others."""
    return checked("grammar", grammar, lambda: grammar)


@dataclass(frozen=True, slots=True)
class Guide:
    """What a client asks the output to be: a form, one of `FORMS`, with its value."""

    form: str
    value: Any
    field: str = ""  # what the client calls the form, where it has another name
    given: Any = None  # what the client gave, where the value was made from it

    @property
    def name(self) -> str:
        return self.field or self.form

    @property
    def shown(self) -> Any:
        return self.value if self.given is None else self.given

    def grammar(self) -> str:
        """Raises `InvalidValueError` for a value that cannot be read. May take long: not for an event loop."""
        try:
            return FORMS[self.form](self.value)
        except InvalidValueError as error:
            raise InvalidValueError(self.name, error.value, error.rule) from None

    def check(self, error: str) -> None:
        """Raise `InvalidValueError` if there is an error of compiling the grammar."""
        reason = " ".join(error.split())  # llguidance shows the place in lines of its own
        require(not error, self.name, self.shown, f"cannot be compiled: {reason:.500}")


def no_token(guide: Guide | None, num_tokens: int) -> InvalidValueError:
    """The error of a request whose parameters exclude every token that could follow its `num_tokens` output tokens."""
    field, value = ("sampling", "these parameters") if guide is None else (guide.name, guide.shown)
    return InvalidValueError(field, value, f"allows no token after {num_tokens} output tokens")


def json_grammar(schema: Any) -> str:
    """The grammar of JSON as json.dumps writes it: with free white space, models would write it until max_tokens."""
    return LLMatcher.grammar_from_json_schema(kept(schema), defaults=JSON_STYLE)


def parsed(schema: str) -> Any:
    value = json.loads(schema)
    if not isinstance(value, dict | bool):
        raise ValueError("is not an object")
    return value


def checked(field: str, text: str, convert: Callable[[], str]) -> str:
    rule = f"must have 1 to {MAX_GRAMMAR_CHARACTERS} characters"
    require(0 < len(text) <= MAX_GRAMMAR_CHARACTERS, field, f"{len(text)} characters", rule)
    try:
        return convert()
    except (ValueError, RecursionError) as error:
        raise InvalidValueError(field, text, f"cannot be read: {error}") from None


FORMS: dict[str, Callable[[Any], str]] = {
    "json_schema": of_json_schema,
    "json_object": of_json_object,
    "regex": of_regex,
    "choice": of_choice,
    "grammar": of_ebnf,
    "composed": of_composed,  # not for clients
}
