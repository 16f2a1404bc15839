"""Measures how long the target's passes take, and detects a pass that hangs."""

import time
from collections.abc import Callable

LEAST_S, PATIENCE = 10.0, 5.0  # a pass hangs once it exceeds both LEAST_S and PATIENCE times the expected time
# Limit for a pass of a size that was not run before, unless PATIENCE allows more: libraries may load or compile kernels
# in it. A target is watched only once it is warm, so a first start may take longer.
FIRST_S = 60.0


class PassTimes:
    """Updated by the thread that runs passes; any thread may ask whether that thread hangs. A turn of the engine's loop
    counts from its beginning, or from `woken`, in seconds of `clock`, when the thread last stopped waiting for other
    tiers.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began: float | None = None  # the turn in progress
        self.longest: dict[int, tuple[float, int]] = {}  # (seconds, tokens) by the bit length of the number of tokens

    def begin(self) -> None:
        self.began = self.clock()

    def end(self, tokens: int, woken: float) -> None:
        """End the turn. `tokens` is the most tokens that its pass may have had."""
        assert self.began is not None
        took = self.clock() - max(self.began, woken), tokens
        self.began = None
        size = tokens.bit_length()
        self.longest[size] = max(took, self.longest.get(size, took))

    def hangs(self, tokens: int, woken: float) -> bool:
        """Whether the turn in progress, with a pass over `tokens` tokens, takes too long."""
        began = self.began  # read once, because the other thread may end the turn meanwhile
        return began is not None and self.clock() - max(began, woken) > self.limit_s(tokens)

    def limit_s(self, tokens: int) -> float:
        """Seconds that a turn with a pass over `tokens` tokens may take: at least `PATIENCE` times the longest pass of
        any size so far, because a pass over few tokens of a long context takes long, as its prefill did.
        """
        longest = self.longest.copy()
        least = LEAST_S if tokens.bit_length() in longest else max(LEAST_S, FIRST_S)
        if not longest:
            return least
        sizes = [size for size in longest if size <= tokens.bit_length()] or [min(longest)]
        seconds, known = longest[max(sizes)]
        expected = seconds * max(1.0, tokens / max(1, known))
        no_less = max(seconds for seconds, _ in longest.values())
        return max(least, PATIENCE * max(expected, no_less))
