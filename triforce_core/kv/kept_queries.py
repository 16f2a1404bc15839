"""The queries of a text's last tokens, kept as the passes computed them.

Every pass of the target keeps its queries, but few snapshots are cut. So keeping them copies nothing if it can, and
those of several passes are joined only when somebody asks for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Pass:
    """One pass over a text, of which the queries from position `start` to `stop` are kept."""

    start: int
    stop: int
    layers: list[Tensor | None]  # per layer: [heads, at least stop - start, head_dim], from position `start` on


class KeptQueries:
    """Those of one text. `positions` says which ones `of` returns; it ends where the last pass ended."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.positions = range(0)
        self.passes: deque[Pass] = deque()  # without gaps between them

    def expect(self, first: int, keep: int, end: int) -> None:
        """The next pass computes those of tokens `keep` to `end`, which replace what is kept from `keep` on. After it
        those from `first` on are kept. Those that were kept before it stay available until the pass after it.
        """
        while self.passes and self.passes[-1].start >= keep:
            self.passes.pop()
        if self.passes:
            self.passes[-1].stop = min(self.passes[-1].stop, keep)
        while self.passes and (self.passes[0].stop <= self.positions.start or self.passes[-1].stop < keep):
            self.passes.popleft()
        self.passes.append(Pass(keep, end, [None] * self.num_layers))
        self.positions = range(first, end)

    def take(self, layer: int, queries: Tensor, together: int) -> None:
        """Keep what is wanted of these, which are those of the last tokens of the expected pass.

        queries: [heads, tokens, head_dim], not written again. `together`: tokens whose queries share their memory. They
        are copied if most of these are not wanted, because a view keeps all of that memory.
        """
        latest, tokens = self.passes[-1], queries.shape[1]
        wanted = min(tokens, len(self.positions))
        own = queries if wanted == tokens else queries[:, tokens - wanted :]
        latest.start = latest.stop - wanted
        latest.layers[layer] = own if 2 * wanted >= together else own.clone()

    def pieces(self, layer: int, start: int, stop: int) -> list[Tensor]:
        """Those from position `start` to `stop`, pass by pass: [heads, tokens, head_dim] each."""
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
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
