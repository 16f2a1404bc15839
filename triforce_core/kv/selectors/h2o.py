"""H2O's selector: the attention that each chunk has got from all queries so far (Zhang et al. 2023, arXiv 2306.14048).

Tokens that got much attention ("heavy hitters") are likely to get more. Unlike H2O's own cache, the full cache forgets
nothing: a chunk that is not chosen now may be chosen at the next cut.
"""

from dataclasses import dataclass

from torch import Tensor

from triforce_core.kv.selectors.base import Chunks


@dataclass(frozen=True, slots=True)
class H2O:
    """Scores a chunk by the attention weights of its tokens, summed over all settled queries and over the query heads
    that share the KV head.

    Expensive: every query's attention is computed once more, in the prompt as well (kv/mass.py).
    """

    num_queries: None = None

    def scores(self, chunks: Chunks) -> Tensor:
        return chunks.mass()
