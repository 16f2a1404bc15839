"""Textbook attention on any device, against which the other kernels are tested."""

from __future__ import annotations

import torch
from torch import Tensor

from triforce_core.attention.base import Partial


def reference(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    """Scores and softmax in float32, without blocks; see `Kernel` for the shapes."""
    heads, queries, head_dim = query.shape
    grouped = query.reshape(keys.shape[0], -1, queries, head_dim)  # [kv_heads, group, queries, head_dim]
    scores = grouped.float() @ keys.float().mT.unsqueeze(1) * scale
    if causal:
        future = torch.ones(queries, keys.shape[1], dtype=torch.bool, device=query.device)
        future = future.triu(keys.shape[1] - queries + 1)
        scores = scores.masked_fill(future, -torch.inf)
    lse = scores.logsumexp(-1)
    output = (scores - lse.unsqueeze(-1)).exp() @ values.float().unsqueeze(1)
    return Partial(output.reshape(heads, queries, head_dim).to(query.dtype), lse.reshape(heads, queries))
