"""What a tier's passes cost: seconds as a linear function of their size, fitted to the passes as they happen.

A pass costs something by itself, something for each sequence and token in it, something for each key that attention
reads, something for each pair of a query and a key, and something if it is over more than one token: then matrices are
multiplied by matrices in place of vectors. The six prices are fitted to the passes so far by least squares over
relative errors, in which older passes count less and less. An error is relative to the geometric mean of the measured
and the predicted time, so that neither a single slow pass nor fast passes of the past weigh too much. No price is
negative.

Each price is pulled towards 0. Where the passes do not show which of two prices a cost belongs to, it goes to the price
with the weaker pull, which is that of tokens: so no cost counts as fixed without evidence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Passes over this number of tokens or more have prices of their own, because a CPU may run them on another number of
# threads.
MANY_TOKENS = 64
# In `Fit.ever`, the weight of a pass relative to the one after it; and how much `ever` counts beside `lately`.
LONG_REMEMBERED, LONG_SHARE = 0.999, 0.005
REMEMBERED = 0.96  # in `Fit.lately`, the weight of a pass relative to the one after it
MOST_WAITING = 64  # passes that are not fitted yet
LATER = np.arange(MOST_WAITING)[::-1]  # how many passes came after each, if so many are fitted together
LONG_WEIGHTS, LATE_WEIGHTS = LONG_REMEMBERED**LATER, REMEMBERED**LATER
# How strongly each price is pulled towards 0 (ridge regression), in the order of `size_of`.
DOUBT = np.array([1e-2, 1e-2, 1e-5, 1e-2, 1e-4, 1e-2])
PRICES = len(DOUBT)


class Part(NamedTuple):
    """One sequence's part of a pass."""

    tokens: int
    before: float  # earlier keys, which all of its tokens see
    read: float = 1.0  # the share of `before` that the pass reads for it: keys that several sequences see are read once


def size_of(parts: Sequence[Part]) -> tuple[float, ...]:
    """The size of a pass, in six numbers: 1 for the pass itself, its sequences, their tokens, the keys read, the pairs
    of query and key, and 1 if the pass is over several tokens.

    The last number is 0 for a single token, and for `MANY_TOKENS` or more, which have prices of their own.
    """
    sequences, tokens, keys, pairs = float(len(parts)), 0.0, 0.0, 0.0
    for count, before, read in parts:
        tokens += count
        keys += read * before + count
        pairs += count * (before + (count + 1) / 2)
    return 1.0, sequences, tokens, keys, pairs, float(1 < tokens < MANY_TOKENS)


@dataclass(slots=True)
class Fit:
    """The prices of one kind of pass. Passes are collected until prices are asked for, so that adding one is cheap."""

    # [6, 7] each: Σ weight · size ⊗ size, and Σ weight · seconds · size. Passes of long ago may have shown prices that
    # the latest passes do not show, such as the prices of a long context.
    lately: NDArray[np.float64] = field(default_factory=lambda: np.zeros((PRICES, PRICES + 1)))
    ever: NDArray[np.float64] = field(default_factory=lambda: np.zeros((PRICES, PRICES + 1)))
    prices: NDArray[np.float64] = field(default_factory=lambda: np.zeros(PRICES))
    waiting: list[tuple[list[Part], float]] = field(default_factory=list)  # passes that are not in the prices yet

    @property
    def known(self) -> bool:
        """Whether there was any pass."""
        return bool(self.waiting) or bool(self.ever[0, 0])

    def add(self, parts: list[Part], seconds: float) -> None:
        self.waiting.append((parts, seconds))
        if len(self.waiting) == MOST_WAITING:
            self.fitted()

    def fitted(self) -> NDArray[np.float64]:
        """The prices, [6]. Prices that come out negative are set to 0, the most negative one first."""
        if not self.waiting:
            return self.prices
        sizes = np.array([size_of(parts) for parts, _ in self.waiting])
        seconds = np.array([took for _, took in self.waiting])
        foretold = sizes @ self.prices if self.prices.any() else seconds
        weighted = sizes.T / (seconds * foretold.clip(seconds / 10, seconds * 10))
        answered, number = np.column_stack([sizes, seconds]), len(sizes)
        self.lately = REMEMBERED**number * self.lately + (weighted * LATE_WEIGHTS[-number:]) @ answered
        self.ever = LONG_REMEMBERED**number * self.ever + (weighted * LONG_WEIGHTS[-number:]) @ answered
        self.waiting.clear()
        both = self.lately + LONG_SHARE * self.ever
        squares, products = both[:, :PRICES], both[:, PRICES]
        scale = np.sqrt(np.maximum(squares.diagonal(), 1e-12))
        evidence, answers, kept = squares / np.outer(scale, scale), products / scale, np.arange(PRICES)
        evidence[kept, kept] += DOUBT
        while (solved := np.linalg.solve(evidence, answers)).min() < 0:
            kept = np.delete(kept, worst := solved.argmin())
            evidence = np.delete(np.delete(evidence, worst, 0), worst, 1)
            answers = np.delete(answers, worst)
        self.prices = np.zeros(PRICES)
        self.prices[kept] = solved / scale[kept]
        return self.prices


class PassCosts:
    """The passes of one tier. Not thread-safe."""

    def __init__(self) -> None:
        self.few, self.many = Fit(), Fit()

    def add(self, parts: list[Part], seconds: float) -> None:
        """A pass over these parts has taken `seconds`."""
        if seconds > 0:
            self._of(parts).add(parts, seconds)

    @property
    def known(self) -> bool:
        """Whether a pass over many tokens has shown what such passes cost."""
        return self.many.known

    def seconds(self, parts: list[Part]) -> float:
        """What a pass over these parts will take; 0 before the first pass of its kind."""
        return float(self._of(parts).fitted() @ size_of(parts))

    def least_chunk(self, before: int) -> float:
        """The tokens, after `before` others, of a chunk whose pass costs twice its fixed part; 0 while unknown."""
        prices = self.many.fitted()
        each = prices[2] + prices[4] * before
        return float(prices @ size_of([Part(0, before)]) / each) if each else 0.0

    def _of(self, parts: list[Part]) -> Fit:
        return self.many if sum(part.tokens for part in parts) >= MANY_TOKENS else self.few
