"""SnapKV's selector: the attention that the last queries really paid to each chunk (Li et al. 2024, arXiv 2404.14469).

Mean keys and bounds guess at attention; this computes it, for the last queries, over all keys. The paper pools the
attention of neighbouring tokens, so that what stands beside a found token is kept with it. Here chunks are chosen
whole, so the chunk takes the place of the pooling kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_core.kv.selectors.base import Chunks, grouped


@dataclass(frozen=True, slots=True)
class SnapKV:
    """Scores a chunk by the sum of the attention weights of its tokens, averaged over the last queries, and over the
    query heads that share the KV head.

    It reads all keys at every cut, and keeps nothing of them: per piece of keys, the log-sum-exp of each query's logits
    in each chunk, from which the softmax over all keys follows exactly.
    """

    num_queries: int = 32  # the paper's window for long prompts

    def scores(self, chunks: Chunks) -> Tensor:
        rows, first = chunks.queries.shape[1], chunks.first_query()
        positions = torch.arange(first, first + rows, device=chunks.queries.device)
        sums = []
        for start, keys in chunks.key_pieces():
            kv_heads, _, size, _ = keys.shape
            own = grouped(chunks.queries, kv_heads)
            # The product is in the model's precision and the softmax in float32, as in transformers' own attention.
            logits = (own @ keys.flatten(1, 2).mT).float() * own.shape[-1] ** -0.5  # [kv_heads, rows of group, tokens]
            tokens = torch.arange(start, start + logits.shape[-1], device=logits.device)
            future = (tokens > positions[:, None]).repeat(own.shape[1] // rows, 1)
            sums.append(logits.masked_fill(future, -torch.inf).unflatten(-1, (-1, size)).logsumexp(-1))
        return torch.cat(sums, dim=-1).softmax(-1)[..., : chunks.count].mean(1)
