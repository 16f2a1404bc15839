"""TriForce's selector: scores each chunk's mean key under the latest queries (Sun et al. 2024, arXiv 2404.11912, 4.1).

The mean over several queries is steadier than the last one alone, and finds less of what stands far back.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_core.kv.selectors.base import Chunks, grouped


@dataclass(frozen=True, slots=True)
class MeanKey:
    """Scores the last query against each chunk's mean key.

    Query heads that share a KV head share one selection: their softmaxes over the chunks are averaged, so that no head
    dominates by the scale of its scores. With one query head per KV head this ranks chunks as the paper does.
    """

    num_queries: int = 1

    def scores(self, chunks: Chunks) -> Tensor:
        return shares(chunks.queries, chunks.landmarks(mean_keys))


def mean_keys(keys: Tensor) -> Tensor:
    """The landmarks, [kv_heads, chunks, head_dim]; see `Landmark`."""
    return keys.mean(2, dtype=torch.float32).to(keys.dtype)


def shares(queries: Tensor, means: Tensor) -> Tensor:
    """queries [heads, rows, head_dim] and means [kv_heads, chunks, head_dim] → each chunk's share, [kv_heads, chunks]
    float32; those of a KV head sum to 1.
    """
    own = grouped(queries.float(), means.shape[0])
    found: Tensor = ((own @ means.float().mT) * queries.shape[-1] ** -0.5).softmax(-1)
    return found.mean(1)
