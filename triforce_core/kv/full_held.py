"""What the full cache keeps of a sequence beside its KV, so that chunks can be selected.

The queries and the attention mass belong to the request. Landmarks depend on the keys of their chunk alone, so requests
share them: if the configured selector has an entry in `LANDMARKS`, its landmarks are in the pool (kv/landmarks.py).
Those for other selectors are computed at each cut, and not kept.
"""

from dataclasses import dataclass, field

from torch import Tensor

from triforce_core.config import MAX_LOOKAHEAD
from triforce_core.kv.base import Held
from triforce_core.kv.kept_queries import KeptQueries
from triforce_core.kv.prefix_tree import Node
from triforce_core.kv.ranges import Range, sliced

# Of each pass, the queries of this many last tokens are kept for selection; of all sampled tokens if these are more.
RECENT_QUERIES = 8
# The tokens of the longest block (both lookaheads together), the token before it, and one to spare. More are sampled
# where a prompt's logprobs are asked for.
MOST_QUERIES = 2 * MAX_LOOKAHEAD + 2
COUNTED_TOGETHER = 64  # settled queries whose attention is counted together, because each count reads all keys


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of the chunks in a snapshot. After them come the remaining tokens below `position`."""

    chunks: Tensor  # [layers, kv_heads, places] int64
    chunk: int
    position: int


@dataclass(slots=True)
class FullHeld(Held):
    """Adds the size of its next growth, and the inputs of chunk selection."""

    next_growth: int = 0  # tokens
    # The tree's node at which the part of this text that the tree holds ends.
    node: Node | None = None
    # The positions whose slots belong to the tree, ascending. The other slots are the sequence's own.
    given: list[Range] = field(default_factory=list)
    told: int = 0  # tokens of its text when it was opened: these tokens are given to the tree as they are read
    snapshots_cut: int = 0
    layouts: dict[int, Layout] = field(default_factory=dict)  # of the latest snapshot and of its base, by version

    num_queries: int | None = 1  # that the request's selector needs
    queries: KeptQueries = field(default_factory=lambda: KeptQueries(0))
    # Attention mass, only if `num_queries` is None: [kv_heads, n] float32 by layer, for those without a window. It
    # covers the first n tokens, which are settled. A token's mass is the attention that it got from the queries of
    # these n tokens. Later queries are not counted yet.
    mass: dict[int, Tensor] = field(default_factory=dict)
    count_to: int = 0  # the next pass counts queries below this position

    @property
    def own_ranges(self) -> list[Range]:
        """The slots that do not belong to the tree."""
        bounds = [0, *(bound for given in self.given for bound in given), sum(b - a for a, b in self.ranges)]
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        return [own for first, last in pairs for own in sliced(self.ranges, first, last)]

    def roll_back(self, keep: int) -> None:
        """Forget what was computed of tokens from `keep` on."""
        self.mass = {layer: each[:, :keep] for layer, each in self.mass.items()}

    def expect_queries(self, keep: int, end: int, num_sampled: int) -> None:
        """Decide which queries are kept after the next pass. This pass computes the queries of tokens `keep` to `end`.

        The last `num_sampled - 1` of these tokens may be drafts. The queries before the first draft count as settled.
        After the pass some drafts may be accepted, so a snapshot may be cut at the first draft's position or later.
        Therefore the queries before each of these positions are kept.
        """
        if self.num_queries == 1:  # the queries of the last pass are enough
            num_queries = min(max(RECENT_QUERIES, num_sampled), MOST_QUERIES)
            self.queries.expect(max(keep, end - num_queries), keep, end)
            return
        settled = end - min(max(num_sampled, 1), MOST_QUERIES) + 1
        before = self.queries.positions
        known = before.start if before.start <= keep <= before.stop else keep
        earliest = first = max(known, settled - (self.num_queries or 1))
        if self.num_queries is None:
            counted = next(iter(self.mass.values())).shape[1]
            self.count_to = settled if settled - counted >= COUNTED_TOGETHER else counted
            first = max(known, min(first, self.count_to))
            earliest = min(first, counted)
        self.queries.expect(first, keep, end, earliest)
