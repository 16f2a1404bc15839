"""FlashAttention on CUDA, in bfloat16 and float16: PyTorch's own operator, or the `flash-attn` package.

Over one sequence, both split long keys over the whole GPU by themselves (flash-decoding). Captured passes, whose
lengths are tensors, have a kernel of our own (flash_decoding.py).
"""

import importlib

import torch
from torch import Tensor

from triforce_core.attention.base import Kernel, Partial, merge_partials

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
