"""FlashAttention on CUDA, in bfloat16 and float16: PyTorch's own operator, or the `flash-attn` package. Not run on a
GPU yet.

Over one sequence, both split long keys over the whole GPU by themselves (flash-decoding). Captured passes need the call
over several sequences, because their lengths are tensors. That call does not split keys if a sequence has several
queries, so the pass cuts its ranges into items (`flash_ranged`). It does split them if each sequence has one query; so
`flash_split` passes a sequence's queries as heads of a single query. Which of the two is faster will be measured
(bench/attention.py), and the other deleted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from triforce_core.attention.base import Kernel, Partial, merge_partials
from triforce_core.attention.ranged import WorkItems

MAX_HEAD_DIM, HEAD_DIM_STEP = 256, 8


def cuda_flash(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    """By PyTorch's private operator, because no public function returns the log-sum-exp; see `Kernel` for shapes."""
    return past_and_own(torch_flash, query, keys, values, scale, causal)


def flash_attn(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    """By the `flash-attn` package; see `Kernel` for the shapes."""
    return past_and_own(package_flash, query, keys, values, scale, causal)


def past_and_own(inner: Kernel, query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    """A kernel made of `inner`, which is called causally only with as many keys as queries.

    For the keys before them, which all queries see, grouped query heads are folded into queries, so that KV is read
    once per group.
    """
    past = keys.shape[1] - query.shape[1]
    if not causal or query.shape[1] == 1:
        return folded(inner, query, keys, values, scale)
    own = inner(query, keys[:, past:], values[:, past:], scale, True)
    return merge_partials([folded(inner, query, keys[:, :past], values[:, :past], scale), own]) if past else own


def folded(inner: Kernel, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Partial:
    heads, queries, head_dim = query.shape
    output, lse = inner(query.reshape(keys.shape[0], -1, head_dim), keys, values, scale, False)
    return Partial(output.reshape(heads, queries, head_dim), lse.reshape(heads, queries))


def torch_flash(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(tokens_first(x) for x in (query, keys, values)),
        *(None, None, query.shape[1], keys.shape[1]),  # one sequence: no offsets
        *(0.0, causal, False),  # no dropout, no debug mask
        scale=scale,
    )
    return Partial(output[0].transpose(0, 1), lse[0])


def package_flash(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    package = importlib.import_module("flash_attn")
    output, lse, _ = package.flash_attn_func(
        *(tokens_first(x) for x in (query, keys, values)), softmax_scale=scale, causal=causal, return_attn_probs=True
    )
    return Partial(output[0].transpose(0, 1), lse[0])


def tokens_first(heads_first: Tensor) -> Tensor:
    """[heads, tokens, head_dim] as one sequence of a batch, [1, tokens, heads, head_dim]; a view."""
    return heads_first.transpose(0, 1)[None]


# varlen(query [tokens, heads, head_dim], keys [slots, kv_heads, head_dim], values, query_starts, most_queries, scale,
# items) -> output like query, lse [heads, tokens]: attention of each item's queries over the item's keys.
Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, WorkItems], tuple[Tensor, Tensor]]


def torch_varlen(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    most_queries: int,
    scale: float,
    items: WorkItems,
) -> tuple[Tensor, Tensor]:
    """By PyTorch's operator over several sequences. As the lengths are given separately, it reads only starts from the
    offsets of the keys. The ranges may therefore lie apart and in any order.
    """
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(query, keys, values),
        *(query_starts, items.starts, most_queries, items.longest),
        *(0.0, False, False),  # no dropout, not causal, no debug mask
        scale=scale,
        seqused_k=items.lengths,
    )
    return output, lse


def flash_ranged(query: Tensor, keys: Tensor, values: Tensor, scale: float, items: WorkItems) -> Partial:
    """The operator over items that are many enough for the whole GPU; see `Ranged` for the shapes."""
    return queries_as_tokens(torch_varlen, query, keys, values, scale, items)


def flash_split(query: Tensor, keys: Tensor, values: Tensor, scale: float, items: WorkItems) -> Partial:
    """The operator over few items, each of which it splits over the whole GPU by itself; see `Ranged` for the shapes.

    It takes as many splits as fill the GPU, given items, heads and `longest`. With many items it does not split; with
    `longest` far above the true lengths, only the first splits have keys.
    """
    return queries_as_heads(torch_varlen, query, keys, values, scale, items)


def queries_as_tokens(
    varlen: Varlen, query: Tensor, keys: Tensor, values: Tensor, scale: float, items: WorkItems
) -> Partial:
    count, queries, kv_heads, _ = query.shape
    output, lse = varlen(
        query.flatten(0, 1), keys.transpose(0, 1), values.transpose(0, 1), items.query_starts, queries, scale, items
    )
    return Partial(output.view(query.shape), without_empty(lse.view(kv_heads, count, queries), items))


def queries_as_heads(
    varlen: Varlen, query: Tensor, keys: Tensor, values: Tensor, scale: float, items: WorkItems
) -> Partial:
    """Each item's queries as query heads of one token. Only for such calls does the operator split the keys, and only
    if there are more query heads than KV heads; so a single query is repeated.
    """
    count, queries, kv_heads, head_dim = query.shape
    least = max(2, queries)
    heads = query.transpose(1, 2).expand(-1, -1, least if queries == 1 else -1, -1).flatten(1, 2)
    output, lse = varlen(heads, keys.transpose(0, 1), values.transpose(0, 1), items.numbers, 1, scale, items)
    output = output.view(count, kv_heads, least, head_dim).narrow(2, 0, queries).transpose(1, 2)
    lse = lse.view(kv_heads, least, count).narrow(1, 0, queries).transpose(1, 2)
    return Partial(output, without_empty(lse, items))


def without_empty(lse: Tensor, items: WorkItems) -> Tensor:
    """lse [kv_heads, items, queries]. For an empty item the operator returns +inf, and output 0."""
    return lse.masked_fill((items.lengths == 0).unsqueeze(1), -torch.inf)
