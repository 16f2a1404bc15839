"""PyTorch's own CPU flash attention, called for its log-sum-exp, which the public function does not return.

Measured (docs/benchmarks/attention.md) it beats two matrix products and a softmax at one query and at 2,048, in
bfloat16 and float32, on views of a larger buffer and without copying them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triforce_core.attention.base import Partial


def cpu_flash(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    """See `Kernel` for the shapes. Grouped query heads are folded into queries, so that KV is read once a group."""
    heads, queries, head_dim = query.shape
    group = heads // keys.shape[0]
    if causal and group > 1:  # folding would mix positions; the keys here are only the queries' own
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    elif group > 1:
        query = query.reshape(keys.shape[0], group * queries, head_dim)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[None], keys[None], values[None], 0.0, causal, scale=scale
    )
    return Partial(output.reshape(heads, queries, head_dim), lse.reshape(heads, queries))
