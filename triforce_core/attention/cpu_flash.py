"""PyTorch's CPU flash attention, by its private operator: the public function does not return the log-sum-exp.

In measurements (docs/decisions/0004-cpu-attention.md) it is faster than two matrix products and a softmax, for 1 and
for 2,048 queries, in bfloat16 and float32, on views of a larger buffer, which it does not copy.
"""

from functools import cache, lru_cache

import torch
from torch import Tensor

from triforce_core.attention.base import Partial, merge_partials
from triforce_core.machine.cpu import cpu_vendor

# With more queries or a larger mask, the mask over all keys costs more than a second call and a merge.
MAX_MASKED_QUERIES, MAX_MASK = 32, 2**20


def cpu_flash(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    """See `Kernel` for the shapes. Grouped query heads are folded into queries, so that KV is read once per group."""
    queries, num_keys = query.shape[1], keys.shape[1]
    if not causal or queries == 1:
        return folded(query, keys, values, scale, None)
    group = query.shape[0] // keys.shape[0]
    if queries <= MAX_MASKED_QUERIES and group * queries * num_keys <= MAX_MASK:
        return folded(query, keys, values, scale, future_mask(group, queries, num_keys, query.dtype))
    past = num_keys - queries
    own = square(query, keys[:, past:], values[:, past:], scale)
    return merge_partials([folded(query, keys[:, :past], values[:, :past], scale, None), own]) if past else own


def folded(query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None) -> Partial:
    heads, queries, head_dim = query.shape
    query = query.reshape(keys.shape[0], -1, head_dim)
    alone = query.shape[1] == 1 and query.dtype == torch.bfloat16 and one_query_is_slow()
    if alone:
        query = query.repeat(1, 2, 1)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], keys[None], values[None], 0.0, False, attn_mask=mask, scale=scale
    )
    if alone:
        output, lse = output[:, :, :1], lse[:, :, :1]
    return Partial(output.reshape(heads, queries, head_dim), lse.reshape(heads, queries))


@cache
def one_query_is_slow() -> bool:
    """Whether the operator takes more than twice as long for one bfloat16 query as for two: measured on AMD's CPUs with
    products of bfloat16 vectors (AVX512-BF16), and not on Intel's.
    """
    return torch.cpu._is_avx512_bf16_supported() and cpu_vendor() == "AuthenticAMD"


def square(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Partial:
    """Causal attention with as many keys as queries. Folding would mix positions, so the KV is repeated per group."""
    group = query.shape[0] // keys.shape[0]
    if group > 1:
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], keys[None], values[None], 0.0, True, scale=scale
    )
    return Partial(output[0], lse[0])


@lru_cache(maxsize=16)  # all layers of a pass use the same masks, one per sequence
def future_mask(group: int, queries: int, keys: int, dtype: torch.dtype) -> Tensor:
    """[1, 1, group * queries, keys]: 0 where a query may attend, -inf at later tokens of the pass."""
    mask = torch.zeros(queries, keys, dtype=dtype)
    mask[:, keys - queries :].fill_(-torch.inf).triu_(1)
    return mask.repeat(group, 1)[None, None]
