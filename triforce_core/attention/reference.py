"""Textbook attention on any device, against which the other kernels are tested; and the same in tiles."""

import torch
from torch import Tensor

from triforce_core.attention.base import Partial, merge_partials

QUERIES, KEYS = 256, 4096  # of a tile: 128 MiB of scores with 32 heads


def reference(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    """Scores and softmax in float32, without blocks; see `Kernel` for the shapes."""
    future = None
    if causal:
        future = torch.ones(query.shape[1], keys.shape[1], dtype=torch.bool, device=query.device)
        future = future.triu(keys.shape[1] - query.shape[1] + 1)
    return masked(query, keys, values, scale, future)


def masked(query: Tensor, keys: Tensor, values: Tensor, scale: float, unseen: Tensor | None) -> Partial:
    """As `reference`; `unseen` [queries, keys] bool says which keys a query does not see."""
    heads, queries, head_dim = query.shape
    grouped = query.reshape(keys.shape[0], -1, queries, head_dim)  # [kv_heads, group, queries, head_dim]
    scores = grouped.float() @ keys.float().mT.unsqueeze(1) * scale
    if unseen is not None:
        scores = scores.masked_fill(unseen, -torch.inf)
    lse = scores.logsumexp(-1)
    output = (scores - lse.unsqueeze(-1)).exp() @ values.float().unsqueeze(1)
    return Partial(output.reshape(heads, queries, head_dim).to(query.dtype), lse.reshape(heads, queries))


def blocked(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    """`reference` in tiles, so that its scores take bounded memory; see `Kernel` for the shapes."""
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
