"""Incremental detokenisation: turns committed tokens into text as they come, and finds stop strings in it.

The output does not depend on how the tokens were split into calls of `feed`. The rules:

- A character belongs to the token that completes it. Text that later tokens may still change (an unfinished UTF-8
  character, a run of byte-fallback tokens) is held back until it can no longer change, or until the output ends.
- The output ends before the first stop string that completes in its text (of two that complete with the same character,
  the longer). The tokens kept are the fewest that complete all of the kept text; later tokens are neither returned nor
  counted. If there are stop strings, tokens are held back with their text while it may belong to a stop string.
- Special tokens have no text, unless it is asked for. End-of-sequence tokens are not part of the output at all.
"""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from triforce_core.errors import require
from triforce_core.messages import TokenLogprobs

REPLACEMENT = "\ufffd"  # decoders write it for bytes that form no character, or not yet
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # one byte of a character, in vocabularies with byte fallback
MAX_WINDOW = 64  # tokens; a longer window that ends in an unfinished character is split inside


class TokenText:
    """Decodes the tokens of one tokenizer to text. Made once and shared by all requests."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.byte_ids = frozenset(i for token, i in tokenizer.get_vocab().items() if BYTE_TOKEN.fullmatch(token))
        self.special_ids = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.shown: dict[int, str] = {}  # special tokens that have text

    def showing(self, texts: Iterable[str]) -> TokenText:
        """The same, but the special tokens among these texts are text."""
        wanted, meaning = set(texts), copy.copy(self)
        added = self.tokenizer.added_tokens_decoder
        meaning.shown = {i: added[i].content for i in self.special_ids if added[i].content in wanted}
        return meaning

    def decode(self, token_ids: list[int]) -> str:
        """The text of these tokens, without special ones."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def spellings(words: Iterable[str]) -> list[str]:
    """What to forbid to keep words out: each as it is and after a blank, with which vocabularies join it."""
    return [text for word in words for text in (word, f" {word}")]


class Detokenizer:
    """Turns tokens into text at a constant cost per token. All returned texts together are the decoding of all tokens.

    Decoding token by token would lose leading spaces and split characters, so a short window of tokens before the new
    one is decoded with it.
    """

    def __init__(self, meaning: TokenText) -> None:
        self.meaning = meaning
        self.window: list[int] = []
        self.shown = 0  # characters of the window's text that were already returned
        self.boundary = 0  # index of a token in the window at which a character begins; the next window may begin there

    def push(self, token: int) -> str:
        """The text that becomes certain with this token."""
        if token in self.meaning.special_ids:
            return self._special(token)
        self.window.append(token)
        if token in self.meaning.byte_ids:
            return ""  # a run of byte tokens is decoded as a whole: one invalid byte changes all of its text
        text = self.meaning.decode(self.window)
        certain = text.removesuffix(REPLACEMENT)  # only the last character may be unfinished
        delta, self.shown = certain[self.shown :], max(self.shown, len(certain))
        if certain == text:
            self._shorten()
        elif len(self.window) > MAX_WINDOW:
            self._shorten_inside(text)
        return delta

    def _special(self, token: int) -> str:
        if token not in self.meaning.shown:
            return ""
        before, self.window, self.shown, self.boundary = self.flush(), [], 0, 0
        return before + self.meaning.shown[token]

    def _shorten(self) -> None:
        """Drop the tokens before the boundary, unless those after it have no text: the next needs some before it."""
        rest = self.meaning.decode(self.window[self.boundary :]) if self.boundary else ""
        if rest:
            self.window, self.shown = self.window[self.boundary :], len(rest)
        if rest or not self.boundary:
            self.boundary = len(self.window)

    def _shorten_inside(self, text: str) -> None:
        """Shorten a window of bytes that form no character, where the texts of both parts, joined, are the whole's."""
        for start in range(len(self.window) - 4, 0, -1):
            head, rest = self.meaning.decode(self.window[:start]), self.meaning.decode(self.window[start:])
            if head and rest and head + rest == text:
                self.window, self.shown, self.boundary = self.window[start:], self.shown - len(head), 0
                return

    def held(self) -> str:
        """The text that is held back, as it is if no token follows."""
        return self.meaning.decode(self.window)[self.shown :]

    def flush(self) -> str:
        """The text that was held back. Call it when no token follows."""
        delta = self.held()
        self.shown += len(delta)
        return delta


class StopString:
    """Searches for one stop string, one character at a time (Knuth, Morris, Pratt 1977)."""

    def __init__(self, text: str) -> None:
        require(text != "", "stop", text, "must not be an empty string")
        self.text = text
        self.matched = 0  # length of the longest prefix of `text` that the characters seen so far end with
        self.borders = [0]  # of each prefix, the length of its longest proper prefix that is also its suffix
        for index in range(1, len(text)):
            self.borders.append(self._longer(self.borders[-1], text[index]))

    def _longer(self, matched: int, character: str) -> int:
        while matched and self.text[matched] != character:
            matched = self.borders[matched - 1]
        return matched + (self.text[matched] == character)

    def see(self, character: str) -> bool:
        """Take the next character; return whether it completes the stop string."""
        if self.matched == len(self.text):  # it was completed before, where it did not stop the output
            self.matched = self.borders[-1]
        self.matched = self._longer(self.matched, character)
        return self.matched == len(self.text)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """An addition to the output: text and tokens."""

    text: str
    tokens: tuple[int, ...]
    origins: bytes  # one Origin per token
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, where asked for
    # One per token: how many characters of `text` it completes. Not compared, so that tests can state text and tokens.
    lengths: tuple[int, ...] = field(default=(), compare=False)


def joined(pieces: Sequence[TextDelta]) -> TextDelta:
    """These pieces, in order, as one."""
    return TextDelta(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        b"".join(piece.origins for piece in pieces),
        tuple(each for piece in pieces for each in piece.logprobs),
        tuple(length for piece in pieces for length in piece.lengths),
    )


@dataclass(slots=True)
class HeldToken:
    """A token that a stop string may still cut off, with the characters that it completes."""

    token: int | None  # None: text that is released after its tokens were returned
    origin: int
    text: str
    logprobs: TokenLogprobs | None = None


class OutputText:
    """The output of one request, as text and tokens that always agree. The receiver has the first `num_resumed` tokens:
    they are fed and searched like all others, but not returned again. A stop string that would leave fewer than
    `min_tokens` tokens is no stop. With `include_stop` the output ends after the stop string instead of before it.
    """

    def __init__(
        self,
        meaning: TokenText,
        *,
        stop: Sequence[str] = (),
        end_tokens: Iterable[int] = (),
        num_resumed: int = 0,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self.detokenizer = Detokenizer(meaning)
        self.stops = [StopString(text) for text in stop]
        self.end_tokens = frozenset(end_tokens)
        self.held: deque[HeldToken] = deque()
        self.min_tokens, self.include_stop = min_tokens, include_stop
        self.found: str | None = None  # the stop string that ended the output: later tokens are ignored
        self.num_tokens = 0  # tokens of the output so far, resumed ones included
        self.num_known = num_resumed

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def feed(self, tokens: Sequence[int], origins: bytes, logprobs: Sequence[TokenLogprobs] = ()) -> TextDelta:
        """Take newly committed tokens, with logprobs or none; return what is certain. Check `stopped` afterwards."""
        scores: Sequence[TokenLogprobs | None] = logprobs or [None] * len(tokens)
        for token, origin, score in zip(tokens, origins, scores, strict=True):
            if token not in self.end_tokens and not self.stopped:
                self.held.append(HeldToken(token, origin, "", score))
                self._append(self.detokenizer.push(token))
        return self._release(self._certain())

    def finish(self) -> TextDelta:
        """The text and tokens that were held back. Call it when no token follows."""
        rest = "" if self.stopped else self.detokenizer.flush()
        if rest and not self.held:
            self.held.append(HeldToken(None, 0, ""))
        self._append(rest)
        return self._release(len(self.held))

    def _append(self, text: str) -> None:
        """Add text to the newest held token, up to the first stop string."""
        for character in text:
            self.held[-1].text += character
            found = [stop.text for stop in self.stops if stop.see(character)]
            if any(self._cut(stop) for stop in sorted(found, key=len, reverse=True)):
                return

    def _cut(self, stop: str) -> bool:
        """End the output before this stop string, which ends the held text, unless it would be too short; return
        whether it has ended.
        """
        left = sum(len(held.text) for held in self.held) - len(stop)
        kept: deque[HeldToken] = deque()
        while left > 0:
            held = self.held[len(kept)]
            kept.append(replace(held, text=held.text[:left]))
            left -= len(held.text)
        if self.num_tokens + sum(held.token is not None for held in kept) < self.min_tokens:
            return False
        self.found = stop
        if not self.include_stop:
            self.held = kept
        return True

    def _certain(self) -> int:
        """How many held tokens can be released: those whose text ends before a possible beginning of a stop string."""
        if self.stopped or not self.stops:
            return len(self.held)
        left = sum(len(held.text) for held in self.held) - max(stop.matched for stop in self.stops)
        count = 0
        for index, held in enumerate(self.held):
            left -= len(held.text)
            if left < 0:
                break
            if held.text:  # a token without text is released with the next token that has text
                count = index + 1
        return count

    def _release(self, count: int) -> TextDelta:
        released = [self.held.popleft() for _ in range(count)]
        num_known = min(count, max(0, self.num_known - self.num_tokens))
        new = released[num_known:]
        tokens = tuple(held.token for held in new if held.token is not None)
        self.num_tokens += num_known + len(tokens)
        origins = bytes(held.origin for held in new if held.token is not None)
        logprobs = tuple(held.logprobs for held in new if held.logprobs is not None)
        lengths = tuple(len(held.text) for held in new if held.token is not None)
        return TextDelta("".join(held.text for held in new), tokens, origins, logprobs, lengths)
