"""How long the target's passes take, and when one of them hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_S, PATIENCE = 10.0, 5.0  # a pass may take this long in any case, and so many times what such a pass took before


class PassTimes:
    """Told by the thread that runs passes; any thread may ask whether it hangs.

    A turn of the engine's loop is one pass and what goes with it. What counts of a turn is the time since it began, or
    since the thread was last `woken` from waiting for other tiers: that wait has a deadline of its own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.began: float | None = None  # the turn in progress
        self.longest: dict[int, tuple[float, int]] = {}  # seconds and tokens, by the bit length of the tokens

    def begin(self) -> None:
        self.began = self.clock()

    def end(self, tokens: int, woken: float) -> None:
        """`tokens`: in the pass, at most."""
        assert self.began is not None
        took = self.clock() - max(self.began, woken), tokens
        self.began = None
        size = tokens.bit_length()
        self.longest[size] = max(took, self.longest.get(size, took))

    def hangs(self, tokens: int, woken: float) -> bool:
        """Whether the turn in progress, with a pass over so many tokens, takes too long."""
        began = self.began  # the other thread may end it meanwhile
        return began is not None and self.clock() - max(began, woken) > self.limit_s(tokens)

    def limit_s(self, tokens: int) -> float:
        """Before the first pass there is none: libraries may take minutes to make their kernels."""
        longest = self.longest.copy()
        if not longest:
            return float("inf")
        sizes = [size for size in longest if size <= tokens.bit_length()] or [min(longest)]
        seconds, known = longest[max(sizes)]
        expected = seconds * max(1.0, tokens / max(1, known))
        # Any pass so far: one over few tokens of a long context may take longer than before, and so did its prefill.
        no_less = max(seconds for seconds, _ in longest.values())
        return max(LEAST_S, PATIENCE * max(expected, no_less))
