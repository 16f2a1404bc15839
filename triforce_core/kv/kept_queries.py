"""The queries of a text's last tokens, kept as the passes computed them.

Every pass of the target keeps its queries, but few snapshots are cut. So queries are kept without a copy if possible,
and the queries of several passes are joined only when somebody asks for them.
"""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Pass:
    """One pass over a text, of which the queries from position `start` to `stop` are kept."""

    start: int
    stop: int
    layers: list[Tensor | None]  # per layer: [heads, stop - start, head_dim]; None until the pass has run


class KeptQueries:
    """The queries of one text. `of` returns those at `positions`, which end where the last or expected pass does."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.positions = range(0)
        self.passes: deque[Pass] = deque()

    def expect(self, first: int, keep: int, end: int, earliest: int | None = None) -> None:
        """The next pass computes the queries of tokens `keep` to `end`. They replace the kept queries from `keep` on.
        After the pass, the queries from `first` on are wanted.

        `earliest`: where it is smaller than `first`, the queries from `earliest` on are kept for the duration of the
        pass, because some caches sum up the attention of these queries during the pass.
        """
        while self.passes and self.passes[-1].start >= keep:
            self.passes.pop()
        while self.passes and self.passes[0].stop <= (first if earliest is None else earliest):
            self.passes.popleft()
        if self.passes and self.passes[-1].stop > keep:
            self._shorten(self.passes[-1], keep)
        self.passes.append(Pass(keep, end, [None] * self.num_layers))
        self.positions = range(first, end)

    def take(self, layer: int, queries: Tensor, together: int) -> None:
        """Keep the wanted part of `queries`, which belong to the last tokens of the expected pass.

        queries: [heads, tokens, head_dim], not written again. `together`: tokens of all texts in the pass, whose
        queries share their memory. If only some of these queries are wanted, they are copied, because a view would keep
        all of that memory.
        """
        latest, tokens = self.passes[-1], queries.shape[1]
        wanted = min(tokens, len(self.positions))
        latest.start = latest.stop - wanted
        latest.layers[layer] = queries if wanted == together else queries[:, tokens - wanted :].clone()

    def _shorten(self, shortened: Pass, stop: int) -> None:
        """Forget the queries from `stop` on. The others are copied, so that rejected drafts take no memory."""
        kept = [None if queries is None else queries[:, : stop - shortened.start] for queries in shortened.layers]
        shortened.stop, shortened.layers = stop, [None if queries is None else queries.clone() for queries in kept]

    def pieces(self, layer: int, start: int, stop: int) -> list[Tensor]:
        """The queries from position `start` to `stop`, pass by pass: [heads, tokens, head_dim] each."""
        found = []
        for each in self.passes:
            if each.start < stop and start < each.stop:
                queries = each.layers[layer]
                assert queries is not None, "queries are read after their pass"
                found.append(queries[:, max(0, start - each.start) : min(stop, each.stop) - each.start])
        return found

    def of(self, layer: int) -> Tensor:
        """[heads, len(positions), head_dim]"""
        pieces = self.pieces(layer, self.positions.start, self.positions.stop)
        assert pieces, "queries are read after a pass"
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
