"""Keys and values in 8 bits: how they are rounded, and kernels that read them, widened block by block.

float8_e4m3fn: four bits of exponent, three of mantissa, up to 448, no infinities. docs/decisions/0016-fp8-kv.md
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from triforce_core.attention.base import Kernel, Partial, merge_partials

ROUNDED = torch.float8_e4m3fn
LARGEST = torch.finfo(ROUNDED).max
KEYS = 8192  # of a block: 128 MiB of keys and values widened to 16 bits with 32 KV heads of 128


def rounded(numbers: Tensor) -> Tensor:
    """To the nearest of `ROUNDED`, ties to even, without a scale; what is beyond ±448 becomes that, NaN stays NaN.

    Clamped first: up to 2.11 PyTorch makes NaN of numbers that are too large, later versions the largest there is.
    """
    return numbers.clamp(-LARGEST, LARGEST).to(ROUNDED)


def widening(kernel: Kernel) -> Kernel:
    """`kernel` over keys and values that are `ROUNDED`, as if they were in the query's dtype. No more of them than
    `KEYS`, and a causal call's own tokens, are widened at a time; the parts are merged.
    """

    def over_rounded(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
        num_keys, own = keys.shape[1], query.shape[1] if causal else 0
        last = (num_keys - own) // KEYS * KEYS  # the causal block begins here, with what is left before the own tokens
        edges = [*range(0, last, KEYS), *([last] if last < num_keys else []), num_keys]
        parts = [
            kernel(query, keys[:, a:b].to(query.dtype), values[:, a:b].to(query.dtype), scale, causal and a == last)
            for a, b in pairwise(edges)
        ]
        return merge_partials(parts)

    return over_rounded
