"""SnapKV's selector: the attention that the last queries really paid to each chunk (Li et al. 2024, arXiv 2404.14469).

Mean keys and bounds guess at attention; this computes it, for the last queries, over all keys. The paper pools the
attention of neighbouring tokens, so that the neighbours of a token with much attention are kept with it. Here chunks
are chosen whole, so the chunk takes the place of the pooling kernel.
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

    It reads all keys at every cut and keeps nothing of them until the next. For each piece of keys it computes the
    log-sum-exp of each query's logits in each chunk. The softmax over all keys follows exactly from these.
    """

    # The paper's window is 32 for long prompts. With the demo pair a window of 8 chooses equally well and costs a
    # quarter.
    num_queries: int = 8

    def scores(self, chunks: Chunks) -> Tensor:
        rows, first = chunks.queries.shape[1], chunks.first_query()
        positions = torch.arange(first, first + rows, device=chunks.queries.device)
        sums = []
        for start, keys in chunks.key_pieces():
            kv_heads, _, size, _ = keys.shape
            own = grouped(chunks.queries, kv_heads)
            # The product is in the model's precision and the softmax in float32, as in transformers' own attention.
            logits = (own @ keys.flatten(1, 2).mT).float().mul_(own.shape[-1] ** -0.5)  # [kv_heads, rows, tokens]
            if start + logits.shape[-1] > first + 1:
                tokens = torch.arange(start, start + logits.shape[-1], device=logits.device)
                future = (tokens > positions[:, None]).repeat(own.shape[1] // rows, 1)
                logits.masked_fill_(future, -torch.inf)
            # One peak for all chunks of the piece, because `logsumexp` of few numbers is slow. The peak of a query that
            # sees nothing here would be -inf, and -inf minus -inf is NaN; with a finite peak the query's sum becomes
            # log(0) = -inf, which is no weight.
            peak = logits.amax(-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
            sums.append(logits.sub_(peak).exp_().unflatten(-1, (-1, size)).sum(-1).log_().add_(peak))
        return torch.cat(sums, dim=-1).softmax(-1)[..., : chunks.count].mean(1)
