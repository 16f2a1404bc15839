"""Grammars: which tokens may follow an output that must match a JSON schema, a regular expression or a grammar.

llguidance compiles grammars and computes the masks (docs/decisions/0018-grammars.md). A mask is a function of the
output so far, so each tier computes it by itself, and a rejected token needs nothing but a rollback.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

# Not from llguidance.torch: that loads PyTorch's compiler, which takes seconds at each start of a process.
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from torch import Tensor

from triforce_core.errors import InvalidValueError
from triforce_core.sampling.compiling import compiled

# The compiled grammars that are kept take at most this much memory. The least recently used goes first.
KEPT_MIB = 256
LEAST_MIB = 1  # of one grammar: small ones take what the process held already, so it does not grow


class Grammars:
    """The compiled grammars of one model. All methods may be called from any thread."""

    def __init__(self, load_tokenizer: Callable[[], Any], vocab_size: int) -> None:
        """`load_tokenizer` gives the model's transformers tokenizer; it is called for the first grammar."""
        self.load_tokenizer, self.vocab_size = load_tokenizer, vocab_size
        self.compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self.compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self.mib: dict[str, float] = {}  # by grammar, what the process grew by when it was compiled
        self.lock = threading.Lock()
        self.tokenizer: LLTokenizer | None = None

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """Start to compile a grammar, unless that was done. The result is in an error state if the grammar is wrong.

        Getting the result raises `InvalidValueError` for a tokenizer that llguidance cannot use, and what loading the
        tokenizer raises.
        """
        with self.lock:
            compiling = self.compiled.get(grammar)
            # After an exception it is tried again: perhaps the tokenizer could not be loaded then, and can be now.
            if compiling is None or (compiling.done() and compiling.exception()):
                compiling = self.compiled[grammar] = self.compiler.submit(self._compile, grammar)
            self.compiled.move_to_end(grammar)
            return compiling

    async def matcher(self, grammar: str) -> LLMatcher:
        """The result of `compile`, for an event loop. Cancelling one waiter does not cancel the others."""
        return await asyncio.shield(asyncio.wrap_future(self.compile(grammar)))

    def _compile(self, grammar: str) -> LLMatcher:
        if self.tokenizer is None:
            try:
                tokenizer = self.load_tokenizer()
                # A tokenizer may know fewer tokens than the model, or more.
                self.tokenizer = from_tokenizer(tokenizer, n_vocab=max(self.vocab_size, len(tokenizer)))
            except ValueError as error:
                raise InvalidValueError(
                    "grammar", grammar, f"needs another tokenizer than this model's: {error}"
                ) from None
        before = psutil.Process().memory_info().rss
        matcher = compiled(self.tokenizer, grammar)
        grown = psutil.Process().memory_info().rss - before
        with self.lock:
            if grammar in self.compiled:  # else it was the oldest before it was compiled
                self.mib[grammar] = max(grown / (1 << 20), LEAST_MIB)
            while len(self.compiled) > 1 and sum(self.mib.values()) > KEPT_MIB:
                oldest, _ = self.compiled.popitem(last=False)
                self.mib.pop(oldest, None)
        return matcher

    def state(self, grammar: str, *, wait: bool) -> GrammarState | None:
        """A new state of the grammar; None where it is not compiled, or has no tokenizer, and `wait` is off."""
        compiling = self.compile(grammar)
        if not wait and (not compiling.done() or compiling.exception()):
            return None
        compiled = compiling.result()
        assert self.tokenizer is not None
        return GrammarState(compiled, self.tokenizer, self.vocab_size)


class GrammarState:
    """The position of one output in its grammar. Beyond the library's limits, no token is allowed."""

    def __init__(self, compiled: LLMatcher, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self.compiled, self.tokenizer, self.vocab_size = compiled, tokenizer, vocab_size
        self._restart()

    def masks(self, output: list[int], drafted: list[int], unchanged: int, stop_token_ids: tuple[int, ...]) -> Tensor:
        """Which tokens may follow `output`, and then each of the tokens `drafted` after it: [1 + drafted, vocab] bool.

        The first `unchanged` tokens of `output`, 0 or more, are as they were in the last call. Stop tokens may follow a
        complete output. The rows after a drafted stop token, or one that is not allowed, have no meaning: no verifier
        looks at them.
        """
        bits = allocate_token_bitmask(1 + len(drafted), self.tokenizer.vocab_size)
        complete = [True] * len(bits)
        if self._follow(output, unchanged):
            for row in range(len(bits)):
                if row and (drafted[row - 1] in stop_token_ids or not self._consume(drafted[row - 1 : row])):
                    break
                self._fill(bits, row)
                complete[row] = self.matcher.is_accepting()
        else:
            bits[0], complete[0] = 0, False
        unpacked = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, : self.vocab_size]
        allowed = torch.from_numpy(unpacked).bool()
        allowed[:, self.tokenizer.eos_tokens] &= torch.tensor(complete)[:, None]
        allowed[:, [t for t in self.tokenizer.eos_tokens if t not in stop_token_ids]] = False
        allowed[:, [*stop_token_ids]] |= torch.tensor(complete)[:, None]
        return allowed

    def _restart(self) -> None:
        self.matcher = self.compiled.deep_copy()
        self.consumed: list[int] = []  # the text that the matcher has seen

    def _follow(self, output: list[int], unchanged: int) -> bool:
        """Bring the matcher to the end of `output`; return whether the grammar allows that text."""
        agreed = min(unchanged, len(self.consumed), len(output))
        if self.matcher.is_error():
            self._restart()
            agreed = 0
        if agreed < len(self.consumed):
            self.matcher.rollback(len(self.consumed) - agreed)
            del self.consumed[agreed:]
        return self._consume(output[agreed:])

    def _consume(self, tokens: list[int]) -> bool:
        """Consume these tokens; return whether the grammar allows all of them."""
        count = self.matcher.try_consume_tokens(tokens) if tokens else 0
        self.consumed += tokens[:count]
        return count == len(tokens) and not self.matcher.is_error()

    def _fill(self, bits: npt.NDArray[np.int32], row: int) -> None:
        """Compute the mask of the text consumed so far. A matcher that meets a limit stays in error. Text that was
        rolled back may be the cause, so a new matcher, which has seen this text alone, decides.
        """
        fill_next_token_bitmask(self.matcher, bits, row)
        if self.matcher.is_error():
            text = self.consumed
            self._restart()
            if self._consume(text):
                fill_next_token_bitmask(self.matcher, bits, row)
            if self.matcher.is_error():
                bits[row] = 0
