"""The reference kernel in tiles, so that its scores take bounded memory, for any device, length and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from triforce_core.attention.base import Partial, merge_partials
from triforce_core.attention.reference import reference

QUERIES, KEYS = 256, 4096  # of a tile: 128 MiB of scores with 32 heads


def blocked(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    """See `Kernel` for the shapes."""
    rows = []
    for first in range(0, query.shape[1], QUERIES):
        some = query[:, first : first + QUERIES]
        before = keys.shape[1] - query.shape[1] + first if causal else keys.shape[1]  # keys that all these queries see
        edges = [(start, min(start + KEYS, before)) for start in range(0, before, KEYS)]
        parts = [reference(some, keys[:, a:b], values[:, a:b], scale, False) for a, b in edges]
        if causal:
            own = slice(before, before + some.shape[1])
            parts.append(reference(some, keys[:, own], values[:, own], scale, True))
        rows.append(merge_partials(parts))
    return Partial(torch.cat([row.output for row in rows], dim=1), torch.cat([row.lse for row in rows], dim=1))
