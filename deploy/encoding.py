"""From text to tokens beside the event loop, in two queues: a short text never waits for long ones.

Encoding a megabyte takes about a second, during which the tokenizer lets other threads run.
"""

from __future__ import annotations

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SHORT_CHARACTERS = 32_768  # such a text is encoded within about 30 ms


class Queue:
    """A thread with a tokenizer of its own, which must not be used by two at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    async def encode(self, text: str) -> tuple[int, ...]:
        return await asyncio.get_running_loop().run_in_executor(self.thread, self._tokens, text)

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text)["input_ids"])


class Encoder:
    """A text's tokens, special ones as the tokenizer adds them."""

    def __init__(self, tokenizer: Any) -> None:
        self.short, self.long = Queue(tokenizer), Queue(tokenizer)

    async def encode(self, text: str) -> tuple[int, ...]:
        return await (self.short if len(text) <= SHORT_CHARACTERS else self.long).encode(text)
