"""Converts text into tokens and back outside the event loop, in two queues, so that a short text never waits for long
ones.

Encoding a megabyte takes about a second, during which the tokenizer lets other threads run.
"""

import asyncio
import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
SHORT_CHARACTERS = 32_768  # a text of this length is encoded within about 30 ms


class Queue:
    """A thread with its own copy of the tokenizer, because two threads must not use one tokenizer at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    async def run(self, use: Callable[[Any], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, use, self.tokenizer)

    async def encode(self, text: str, special: bool) -> tuple[int, ...]:
        return await asyncio.get_running_loop().run_in_executor(self.thread, self._tokens, text, special)

    async def decode(self, tokens: Sequence[int]) -> str:
        return await asyncio.get_running_loop().run_in_executor(self.thread, self._text, tokens)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode([*tokens], clean_up_tokenization_spaces=False))

    def _tokens(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=special)["input_ids"])


class Encoder:
    """Encodes texts into tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.short, self.long = Queue(tokenizer), Queue(tokenizer)

    async def run(self, num_characters: int, use: Callable[[Any], T]) -> T:
        """The result of `use`, called with a tokenizer on its thread; `num_characters` of its text choose the queue."""
        return await (self.short if num_characters <= SHORT_CHARACTERS else self.long).run(use)

    async def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """The text's tokens; `special`: with the special tokens that the tokenizer adds to a whole text."""
        return await (self.short if len(text) <= SHORT_CHARACTERS else self.long).encode(text, special)

    async def decode(self, tokens: Sequence[int]) -> str:
        """The tokens' text, special tokens included."""
        return await (self.short if len(tokens) <= SHORT_CHARACTERS // 4 else self.long).decode(tokens)
