"""The signature of a kernel, and the log-sum-exp merge of partial results (Dao et al., Flash-Decoding)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention of some queries over some of their keys."""

    output: Tensor  # [heads, queries, head_dim], model dtype
    lse: Tensor  # [heads, queries] float32: log of the sum of exp(scores), the weight in the merge


class Scoring(NamedTuple):
    """How a layer weighs keys."""

    scale: float  # of the products of queries and keys
    # [heads]: a learned score of each head, which takes part in its softmax and has no value (gpt-oss).
    sinks: Tensor | None = None

    def sink(self, query: Tensor) -> list[Partial]:
        """What the learned sinks add to the results of these queries, if there are any."""
        if self.sinks is None:
            return []
        return [Partial(torch.zeros_like(query), self.sinks.float()[:, None].expand(query.shape[:2]))]


# kernel(query [heads, queries, head_dim], keys [kv_heads, keys, head_dim], values, scale, causal) -> Partial
# `heads` is a multiple of `kv_heads`: query head h reads KV head h // (heads / kv_heads).
# With `causal` the last keys are those of the queries' tokens, one per query, and no query sees keys after its own.
Kernel = Callable[[Tensor, Tensor, Tensor, float, bool], Partial]


def merge_partials(parts: list[Partial]) -> Partial:
    """Attention over the union of the parts' keys, each part weighted by its log-sum-exp."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([p.lse for p in parts])  # [parts, heads, queries]
    return Partial(weighted(parts, lses), lses.logsumexp(0))


def merge(parts: list[Partial]) -> Tensor:
    """The merged output alone, [heads, queries, head_dim]."""
    return parts[0].output if len(parts) == 1 else weighted(parts, torch.stack([p.lse for p in parts]))


def weighted(parts: list[Partial], lses: Tensor) -> Tensor:
    weights = lses.softmax(0).unsqueeze(-1)
    output = weights[0] * parts[0].output
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        output += weight * part.output
    return output.to(parts[0].output.dtype)
