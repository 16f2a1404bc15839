"""Shared noise: every tier adds the same Gumbel noise to the same token at the same position of a request.

Drawing `argmax(logit / T + g)` with standard Gumbel g samples the softmax exactly (Gumbel 1954; Maddison et al. 2014).
As g depends only on (seed, position, vocabulary id), the token depends on these and the distribution alone.
"""

from typing import TypeVar

import torch
from torch import Tensor

MASK = 0xFFFFFFFF

Word = TypeVar("Word", int, Tensor)  # the same arithmetic on numbers of the host and on int64 tensors


def mix(x: Word) -> Word:
    """A bijective 32-bit hash with low bias, int64 in and out, values below 2**32.

    Of the multipliers that the hash-prospector search (C. Wellons) found for two-round hashes, these are the best. The
    factors have at most 32 and 31 bits, so every product stays below 2**63 and CPU and GPU agree bit for bit.
    """
    x = x ^ (x >> 16)  # a new tensor, which the steps after it change in place
    x *= 0x21F0AAAD
    x &= MASK
    x ^= x >> 15
    x *= 0x735A2D97
    x &= MASK
    x ^= x >> 15
    return x


def row_keys(seeds: Word, positions: Word) -> tuple[Word, Word]:
    """Two 32-bit words for each (seed, position); each depends on all 64 bits of the seed."""
    low, high = seeds & MASK, (seeds >> 32) & MASK
    first = mix(mix(mix(low) ^ high) ^ positions)
    second = mix(mix(mix(high ^ 0x9E3779B9) ^ low) ^ (positions ^ 0x85EBCA6B))
    return first, second


def gumbel(first: Tensor, second: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise of each vocabulary id under its row's keys; int64 inputs that broadcast, float64 out."""
    uniform = mix(mix(token_ids ^ first) ^ second).to(torch.float64)
    uniform += 0.5
    uniform *= 2.0**-32
    return uniform.log_().neg_().log_().neg_()
