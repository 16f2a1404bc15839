"""No retrieval: the latest chunks, beside the first one, which every snapshot has (Xiao et al. 2023, arXiv 2309.17453).

It is what the other selectors must beat. Nothing is computed, and a snapshot holds nothing from the middle of a text.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_core.kv.selectors.base import Chunks


@dataclass(frozen=True, slots=True)
class Streaming:
    """Scores a chunk by its place in the text."""

    num_queries: int = 1

    def scores(self, chunks: Chunks) -> Tensor:
        places = torch.arange(chunks.count, dtype=torch.float32, device=chunks.queries.device)
        return places.repeat(chunks.kv_heads, 1)
