"""From committed tokens to text, as they come: incremental detokenisation, and stop strings wherever they fall.

What a caller gets does not depend on how the tokens were split into runs. The rules:

- A character belongs to the token that completes it. Text that later tokens may still change (an unfinished UTF-8
  character, a run of byte-fallback tokens) is held back until they cannot, or until the output ends.
- The output ends before the first stop string that completes in its text (of two that complete with the same character,
  the longer). The tokens kept are the shortest run of the output that completes all of the kept text; the others are
  given to nobody and count for nothing. Where stop strings are asked for, tokens and text are held back together while
  they may still belong to one.
- Special tokens have no text. End-of-sequence tokens are not part of the output at all.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character, or not yet one
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # one byte of a character, in vocabularies with byte fallback
MAX_WINDOW = 64  # tokens without a clean boundary after which one is looked for inside


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def get_vocab(self) -> dict[str, int]: ...

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str | list[str]: ...


class TokenText:
    """What the tokens of one tokenizer mean as text. Made once, shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.byte_ids = frozenset(i for token, i in tokenizer.get_vocab().items() if BYTE_TOKEN.fullmatch(token))
        self.special_ids = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)

    def decode(self, token_ids: list[int]) -> str:
        """The text of these tokens, without special ones."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class Detokenizer:
    """Tokens in, text out, at a constant cost a token: the texts returned add up to the decoding of all the tokens.

    Decoding token by token would lose leading spaces and split characters, so a short window of tokens before the new
    one is decoded with it.
    """

    def __init__(self, meaning: TokenText) -> None:
        self.meaning = meaning
        self.window: list[int] = []
        self.shown = 0  # characters of the window's text that were returned
        self.boundary = 0  # a token of the window at which a character begins: where the next window may begin

    def push(self, token: int) -> str:
        """The text that is certain with this token and was not before."""
        if token in self.meaning.special_ids:
            return ""
        self.window.append(token)
        if token in self.meaning.byte_ids:
            return ""  # a run of byte tokens is decoded as a whole: an odd one out changes the text of all
        text = self.meaning.decode(self.window)
        certain = text.removesuffix(REPLACEMENT)  # only the last may be the beginning of a character
        delta, self.shown = certain[self.shown :], max(self.shown, len(certain))
        if certain == text:
            self._shorten()
        elif len(self.window) > MAX_WINDOW:
            self._shorten_inside(text)
        return delta

    def _shorten(self) -> None:
        """Move the window on, if that leaves text in it for the next token to be joined to."""
        rest = self.meaning.decode(self.window[self.boundary :]) if self.boundary else ""
        if rest:
            self.window, self.shown = self.window[self.boundary :], len(rest)
        if rest or not self.boundary:
            self.boundary = len(self.window)

    def _shorten_inside(self, text: str) -> None:
        """Move a window of bytes that make no character on, to where it decodes to the same text in two parts."""
        for start in range(len(self.window) - 4, 0, -1):
            head, rest = self.meaning.decode(self.window[:start]), self.meaning.decode(self.window[start:])
            if head and rest and head + rest == text:
                self.window, self.shown, self.boundary = self.window[start:], self.shown - len(head), 0
                return

    def flush(self) -> str:
        """The text held back, when no token follows."""
        text = self.meaning.decode(self.window)
        delta, self.shown = text[self.shown :], max(self.shown, len(text))
        return delta


class StopString:
    """One stop string, sought a character at a time (Knuth, Morris, Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters of `text` that the end of what was seen may be the beginning of
        self.borders = [0]  # of each prefix, the length of its longest proper prefix that is also its suffix
        for index in range(1, len(text)):
            self.borders.append(self._longer(self.borders[-1], text[index]))

    def _longer(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self.borders[matched - 1]
        return matched + (self.text[matched] == character)

    def see(self, character: str) -> bool:
        """Whether this character completes the stop string, after which nothing more may be shown to it."""
        self.matched = self._longer(self.matched, character)
        return self.matched == len(self.text)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a step adds to the output."""

    text: str
    tokens: tuple[int, ...]
    origins: bytes  # one Tier a token


def joined(pieces: Sequence[TextDelta]) -> TextDelta:
    """What these pieces, one after the other, add to the output."""
    return TextDelta(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        b"".join(piece.origins for piece in pieces),
    )


@dataclass(slots=True)
class HeldToken:
    """A token that may yet be cut off, and the characters that it completes."""

    token: int | None  # None: text that was still held back when its tokens were given out
    origin: int
    text: str


class OutputText:
    """The output of one request, as text and tokens that always agree.

    `stop` holds non-empty strings. `resumed` are output tokens that the receiver already has: they count, and matter
    for stop strings, but neither they nor their text are given again.
    """

    def __init__(
        self,
        meaning: TokenText,
        *,
        stop: Sequence[str] = (),
        end_tokens: Iterable[int] = (),
        resumed: Sequence[int] = (),
    ) -> None:
        self.detokenizer = Detokenizer(meaning)
        self.stops = [StopString(text) for text in stop]
        self.end_tokens = frozenset(end_tokens)
        self.held: deque[HeldToken] = deque()
        self.stopped = False  # a stop string was found: nothing more is taken
        self.num_tokens = 0  # of the output so far, resumed ones included
        self.num_known = len(resumed)
        self.feed(resumed, bytes(len(resumed)))

    def feed(self, tokens: Sequence[int], origins: bytes) -> TextDelta:
        """Take newly committed tokens; returns what can be given out now. Look at `stopped` afterwards."""
        for token, origin in zip(tokens, origins, strict=True):
            if token not in self.end_tokens and not self.stopped:
                self.held.append(HeldToken(token, origin, ""))
                self._append(self.detokenizer.push(token))
        return self._release(self._certain())

    def finish(self) -> TextDelta:
        """What was held back, when no token follows."""
        rest = "" if self.stopped else self.detokenizer.flush()
        if rest and not self.held:
            self.held.append(HeldToken(None, 0, ""))
        self._append(rest)
        return self._release(len(self.held))

    def _append(self, text: str) -> None:
        """Add text to the newest held token, up to the first stop string."""
        for character in text:
            self.held[-1].text += character
            found = [len(stop.text) for stop in self.stops if stop.see(character)]
            if found:
                self._cut(max(found))
                return

    def _cut(self, num_characters: int) -> None:
        """End the output `num_characters` before the end of the held text."""
        self.stopped = True
        left = sum(len(held.text) for held in self.held) - num_characters
        kept: deque[HeldToken] = deque()
        while left > 0:
            held = self.held.popleft()
            held.text = held.text[:left]
            left -= len(held.text)
            kept.append(held)
        self.held = kept

    def _certain(self) -> int:
        """How many held tokens can be given out: those that end before what may be the beginning of a stop string."""
        if self.stopped or not self.stops:
            return len(self.held)
        left = sum(len(held.text) for held in self.held) - max(stop.matched for stop in self.stops)
        count = 0
        for index, held in enumerate(self.held):
            left -= len(held.text)
            if left < 0:
                break
            if held.text:  # one without text goes with the next that has some
                count = index + 1
        return count

    def _release(self, count: int) -> TextDelta:
        released = [self.held.popleft() for _ in range(count)]
        num_known = min(count, max(0, self.num_known - self.num_tokens))
        new = released[num_known:]
        tokens = tuple(held.token for held in new if held.token is not None)
        self.num_tokens += num_known + len(tokens)
        origins = bytes(held.origin for held in new if held.token is not None)
        return TextDelta("".join(held.text for held in new), tokens, origins)
