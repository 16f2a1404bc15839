"""How much attention the tokens of a text have got from all its queries (H2O, Zhang et al. 2023, arXiv 2306.14048).

Attention kernels do not report the attention weights, so the weights are computed once more, from the same queries and
keys.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

# The most logits computed at a time, by type of device. On a CPU, pieces of 4 MiB stay in the cache and take a third of
# the time that pieces of 64 MiB take. A GPU needs large pieces.
MOST_LOGITS = {"cpu": 1 << 20, "cuda": 1 << 24}


def attention_mass(queries: Tensor, keys: Tensor) -> Tensor:
    """The attention that each token gets from some queries, [tokens] float32, summed over queries and heads.

    Args:
        queries: [heads, n, head_dim], of the last n tokens, of the query heads that share one KV head.
        keys: [tokens, head_dim], of all tokens of the text so far. Each query sees the keys up to its own token's.
    """
    (heads, count, head_dim), tokens = queries.shape, len(keys)
    mass = torch.zeros(tokens, dtype=torch.float32, device=keys.device)
    together = max(1, MOST_LOGITS[keys.device.type] // (heads * tokens))
    for first in range(0, count, together):
        some = queries[:, first : first + together]
        rows = some.shape[1]
        seen = tokens - count + first + rows  # keys that the last of these queries sees
        # The product is in the model's precision and the softmax in float32, as in transformers' own attention.
        logits = (some @ keys[:seen].mT).float() * head_dim**-0.5
        future = torch.ones(rows, rows, dtype=torch.bool, device=keys.device).triu(1)
        logits[..., seen - rows :].masked_fill_(future, -torch.inf)
        mass[:seen] += logits.softmax(-1).sum((0, 1))
    return mass


def with_more(mass: Tensor, queries: Tensor, keys: Iterable[Tensor]) -> Tensor:
    """`mass` [kv_heads, tokens before] with what these queries add, [kv_heads, tokens].

    Args:
        queries: [heads, n, head_dim], of the last n tokens.
        keys: of each KV head, [tokens, head_dim] on any device.
    """
    by_head = queries.unflatten(0, (len(mass), -1))
    more = [attention_mass(own, head.to(own.device)) for own, head in zip(by_head, keys, strict=True)]
    found = torch.stack(more)
    found[:, : mass.shape[1]] += mass
    return found
