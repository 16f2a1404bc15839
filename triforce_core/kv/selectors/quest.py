"""Quest's selector: the most that any key of a chunk could give the last query (Tang et al. 2024, arXiv 2406.10774).

A chunk whose keys point in many directions has a mean that says little of them. The smallest and the largest value of
each coordinate, over the chunk's keys, bound all of these keys. So one key that matters cannot hide among others that
do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_core.kv.selectors.base import Chunks, grouped


@dataclass(frozen=True, slots=True)
class Quest:
    """Scores the last query against the bounds of each chunk's keys, Σ over coordinates of max(q · min, q · max).

    Query heads that share a KV head share one selection as in `MeanKey`, by the mean of their softmaxes.
    """

    num_queries: int = 1

    def scores(self, chunks: Chunks) -> Tensor:
        return shares(chunks.queries, chunks.landmarks(bounds))


def bounds(keys: Tensor) -> Tensor:
    """The landmarks, [kv_heads, chunks, 2, head_dim]: each coordinate's smallest and largest value in the chunk."""
    return torch.stack([keys.amin(2), keys.amax(2)], dim=2)


def shares(queries: Tensor, landmarks: Tensor) -> Tensor:
    """queries [heads, rows, head_dim] and the `bounds` → each chunk's share, [kv_heads, chunks] float32."""
    own = grouped(queries.float(), landmarks.shape[0])  # [kv_heads, rows of the group, head_dim]
    low, high = landmarks.float().unbind(2)
    # max(q · low, q · high) is q · high where q is positive and q · low elsewhere: two products of matrices.
    most = own.clamp_min(0) @ high.mT + own.clamp_max(0) @ low.mT
    found: Tensor = (most * queries.shape[-1] ** -0.5).softmax(-1)
    return found.mean(1)
