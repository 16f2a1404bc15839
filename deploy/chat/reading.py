"""Reads one answer to a chat while its parts come: what its parser finds, how much of it is reasoning, how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from deploy.chat.parsing import Arguments, Call, Content, Event, Parser, merged
from deploy.parts import Part

if TYPE_CHECKING:
    from deploy.openai_api.chat_requests import Chat


@dataclass(slots=True)
class Block:
    """A stretch of an answer that is one thing: text, reasoning, or a call, whose text is the JSON of its arguments."""

    kind: str  # text, reasoning or call
    name: str = ""  # of the function that is called
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Step(NamedTuple):
    """What a piece of output does to a block: it begins it, extends it by `text`, or ends it."""

    does: Literal["begin", "extend", "end"]
    block: Block
    text: str = ""
    cut: bool = False  # the output ended within the block


class Reading:
    """One answer. Calls beyond the first are left out if the chat wants a single one."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self.parser: Parser | None = None  # until the first part
        self.num_calls = 0
        self.reasoning_tokens = 0
        self.ignores = False  # the latest call is one too many
        self.block: Block | None = None  # which may go on

    def events(self, part: Part) -> list[Event]:
        """What a part adds. Parts must come in order."""
        if self.parser is None:
            self.parser = self.chat.parser(part.prompt)
        found = [event for text in self._pieces(part) for event in self._fed(self.parser, text)]
        if part.done:
            found += self.parser.finish()
        return [event for event in merged(found) if self._wanted(event)]

    def steps(self, part: Part) -> Iterator[Step]:
        """What a part adds, as steps of blocks that follow each other. Use either this or `events`."""
        for event in self.events(part):
            if isinstance(event, Call):
                yield from self._next(Block("call", event.name))
                continue
            kind = "text" if isinstance(event, Content) else "call" if isinstance(event, Arguments) else "reasoning"
            if self.block is None or self.block.kind != kind:
                yield from self._next(Block(kind))
            assert self.block is not None
            self.block.pieces.append(event.text)
            yield Step("extend", self.block, event.text)
        if part.done:
            yield from self._next(None, cut=part.done.finish_reason == "length" or self._in_call)

    def _next(self, block: Block | None, *, cut: bool = False) -> Iterator[Step]:
        if self.block is not None:
            yield Step("end", self.block, cut=cut)
        self.block = block
        if block is not None:
            yield Step("begin", block)

    def _pieces(self, part: Part) -> Iterator[tuple[str, int]]:
        """The part's text in pieces, each with the number of tokens that end in it: token by token, to know which are
        reasoning. Where text was held back, the last piece may have no token.
        """
        text, ends = part.piece.text, [0, *accumulate(part.piece.lengths)]
        if self.chat.family.reasoning is None:
            yield text, len(part.piece.tokens)
            return
        for begin, end in pairwise(ends):
            yield text[begin:end], 1
        yield text[ends[-1] :], 0

    def _fed(self, parser: Parser, piece: tuple[str, int]) -> list[Event]:
        text, tokens = piece
        found = parser.feed(text)
        self.reasoning_tokens += tokens * parser.in_reasoning
        return found

    def _wanted(self, event: Event) -> bool:
        if isinstance(event, Call):
            self.ignores = self.chat.single_call and self.num_calls > 0
            self.num_calls += not self.ignores
        return not (self.ignores and isinstance(event, Call | Arguments))

    def called(self, end: Part) -> bool:
        """Whether the answer, whose last part this is, ended after whole calls, and not in one, such as by a stop
        string.
        """
        stopped = end.done is not None and end.done.finish_reason == "stop"
        return stopped and self.num_calls > 0 and not self._in_call

    @property
    def _in_call(self) -> bool:
        return self.parser is not None and self.parser.in_call and not self.ignores
