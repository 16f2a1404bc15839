"""Attention of captured passes on CUDA, as a Triton kernel with tiles as small as a matrix product can have, 16
queries: FlashAttention's tiles of 64 or more are mostly padding for the few of a decoding pass. One program reads one
item of one KV head, for all query heads of the group (Dao et al., Flash-Decoding); the caller merges the items.
Figures: docs/benchmarks/gpu.md
"""

from functools import cache
from math import e, log2
from typing import Any

import torch
from torch import Tensor

from triforce_core.attention.base import Partial
from triforce_core.attention.ranged import WorkItems

# Of eleven combinations none was faster by more than 2% on an H100, over 4,096 keys and over 107,008.
KEYS, WARPS, STAGES = 64, 4, 3  # keys of a tile, warps of a program, tiles that are on their way from memory
LEAST_ROWS, MOST_ROWS = 16, 64  # queries of a tile


def triton_ranged(query: Tensor, keys: Tensor, values: Tensor, scale: float, items: WorkItems) -> Partial:
    """For bfloat16 and float16; see `Ranged` for the shapes."""
    return Partial(*attention(query, keys, values, scale, items.starts, items.lengths))


# An operator of PyTorch, so that tensors without data, as in tests and compilers, pass through it too.
@torch.library.custom_op("triforce::attention_over_ranges", mutates_args=())
def attention(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, starts: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    import triton

    query = query.contiguous()  # items of one sequence may come as one query, expanded
    output, lse = results(query)
    count, rows, heads, head_dim = query.shape
    tile = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(rows)))
    dim = max(16, triton.next_power_of_2(head_dim))
    with torch.cuda.device_of(query):  # Triton launches on the current device
        kernel()[heads, count, triton.cdiv(rows, tile)](
            *(query, keys, values, output, lse, starts, lengths),
            *(scale * log2(e), rows, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)),
            *(tile, keys_of_tile(tile, dim, query.device), dim, head_dim),
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return output, lse


@cache
def keys_of_tile(tile: int, dim: int, device: torch.device) -> int:
    """As many as fit a multiprocessor's shared memory (99 KiB on an RTX 4090, 227 on an H100) beside the queries."""
    if device.type != "cuda":
        return KEYS
    from triton.runtime import driver

    held: int = driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    fitting = (keys for keys in (KEYS, KEYS // 2) if 2 * dim * (2 * keys * STAGES + tile) <= 0.9 * held)
    return next(fitting, KEYS // 4)


def results(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Empty tensors for the output and the log-sum-exps, which is all that tensors without data need."""
    count, rows, heads, _head_dim = query.shape
    return query.new_empty(query.shape), query.new_empty(heads, count, rows, dtype=torch.float32)


attention.register_fake(results)


@cache
def kernel() -> Any:
    """The kernel, which Triton compiles at its first call. Made only here, because Triton may not be installed."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def over_items(  # type: ignore[no-untyped-def]
        query,
        keys,
        values,
        output,
        lse,
        starts,
        lengths,
        scale,
        rows,
        key_head,
        key_slot,
        value_head,
        value_slot,
        ROWS: tl.constexpr,
        KEYS: tl.constexpr,
        DIM: tl.constexpr,
        HEAD_DIM: tl.constexpr,
    ):
        head, item = tl.program_id(0), tl.program_id(1)
        heads, items = tl.num_programs(0), tl.num_programs(1)
        row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        key, dim = tl.arange(0, KEYS), tl.arange(0, DIM)
        place = ((item * rows + row[:, None]) * heads + head) * HEAD_DIM + dim[None, :]
        inside = (row[:, None] < rows) & (dim[None, :] < HEAD_DIM)
        asked = tl.load(query + place, mask=inside, other=0.0)

        # Offsets within a large pool may exceed 32 bits.
        start, length = tl.load(starts + item).to(tl.int64), tl.load(lengths + item)
        keys += head.to(tl.int64) * key_head + start * key_slot
        values += head.to(tl.int64) * value_head + start * value_slot

        # Of each row: the greatest score so far, the sum of the weights, and of the weighted values. Scores are
        # exponents of two, which the hardware computes directly.
        most = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, DIM], tl.float32)
        for first in range(0, length, KEYS):
            slot = first + key
            seen = slot < length
            there = seen[:, None] & (dim[None, :] < HEAD_DIM)
            some = tl.load(keys + slot[:, None] * key_slot + dim[None, :], mask=there, other=0.0)
            scores = tl.where(seen[None, :], tl.dot(asked, tl.trans(some)) * scale, -float("inf"))
            now = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp2(scores - now[:, None])
            fade = tl.exp2(most - now)
            some = tl.load(values + slot[:, None] * value_slot + dim[None, :], mask=there, other=0.0)
            summed = tl.dot(weights.to(some.dtype), some, summed * fade[:, None])
            total = total * fade + tl.sum(weights, 1)
            most = now

        # An item without keys has output 0 and log-sum-exp -inf.
        mean = summed / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(output + place, mean.to(output.dtype.element_ty), mask=inside)
        natural = (most + tl.log2(total)) * 0.6931471805599453  # times log(2), since scores are exponents of two
        tl.store(lse + (head * items + item) * rows + row, natural, mask=row < rows)

    return over_items
