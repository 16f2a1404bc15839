"""Log-sum-exps of attention logits by chunk of keys, from which selectors know what each chunk weighs.

Two ways: with PyTorch's operators, and one Triton kernel, which reads the keys once and writes nothing but the sums.
"""

from functools import cache
from math import e, log2
from typing import Any, Protocol

import torch
from torch import Tensor

from triforce_core.attention.flash_decoding import LEAST_ROWS, MOST_ROWS, WARPS

# The most logits computed at a time, by type of device: on a CPU few stay in its cache, a GPU needs many to be busy.
MOST_LOGITS = {"cpu": 1 << 19, "cuda": 1 << 25}
KEYS = 128  # of a tile of the kernel


class ChunkSums(Protocol):
    def __call__(self, query: Tensor, keys: Tensor, scale: float, chunk: int, seen: int, period: int) -> Tensor:
        """Of each query, the log-sum-exp of its logits over each chunk, [kv_heads, queries, chunks] float32. It is -inf
        where the query sees no key of the chunk.

        Args:
            query: [kv_heads, queries, head_dim].
            keys: [kv_heads, tokens, head_dim], in chunks of `chunk` tokens, of which the last may have fewer.
            seen: query i sees the first `seen + i % period` keys; these may be more than there are, or less than one.
        """
        ...


def torch_chunk_sums(query: Tensor, keys: Tensor, scale: float, chunk: int, seen: int, period: int) -> Tensor:
    """See `ChunkSums`; on any device, in any dtype."""
    kv_heads, queries, _ = query.shape
    together = max(1, MOST_LOGITS[keys.device.type] // (kv_heads * queries * chunk)) * chunk
    pieces = [
        _piece(query, some, scale, chunk, seen - together * index, period)
        for index, some in enumerate(keys.split(together, dim=1))
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def _piece(query: Tensor, keys: Tensor, scale: float, chunk: int, seen: int, period: int) -> Tensor:
    queries, tokens = query.shape[1], keys.shape[1]
    # The product is in the model's precision and the sum in float32, as in transformers' own attention.
    logits = (query @ keys.mT).float().mul_(scale)
    if seen < tokens:
        last = seen + torch.arange(queries, device=keys.device) % period
        logits.masked_fill_(torch.arange(tokens, device=keys.device) >= last[:, None], -torch.inf)
    # One peak for all chunks of the piece, because `logsumexp` of few numbers is slow. The peak of a query that sees
    # nothing here would be -inf, and -inf minus -inf is NaN; with a finite peak the query's sum becomes log(0) = -inf.
    peak = logits.amax(-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
    weights = logits.sub_(peak).exp_()
    whole = tokens // chunk * chunk
    sums = weights[..., :whole].unflatten(-1, (-1, chunk)).sum(-1)
    if whole < tokens:
        sums = torch.cat([sums, weights[..., whole:].sum(-1, keepdim=True)], dim=-1)
    found: Tensor = sums.log_().add_(peak)
    return found


def triton_chunk_sums(query: Tensor, keys: Tensor, scale: float, chunk: int, seen: int, period: int) -> Tensor:
    """See `ChunkSums`; in one pass over the keys, for chunks that divide a tile."""
    if KEYS % chunk:
        return torch_chunk_sums(query, keys, scale, chunk, seen, period)
    found: Tensor = fused(query, keys, scale, chunk, seen, period)
    return found


# An operator of PyTorch, so that tensors without data, as in tests, pass through it too.
@torch.library.custom_op("triforce::chunk_sums", mutates_args=())
def fused(query: Tensor, keys: Tensor, scale: float, chunk: int, seen: int, period: int) -> Tensor:
    import triton

    query, sums = query.contiguous(), results(query, keys, scale, chunk, seen, period)
    (kv_heads, queries, head_dim), tokens = query.shape, keys.shape[1]
    tile = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(queries)))
    with torch.cuda.device_of(query):  # Triton launches on the current device
        kernel()[triton.cdiv(tokens, KEYS), kv_heads, triton.cdiv(queries, tile)](
            *(query, keys, sums, scale * log2(e), queries, tokens, seen, period, keys.stride(0), keys.stride(1)),
            *(tile, KEYS, chunk, max(16, triton.next_power_of_2(head_dim)), head_dim),
            num_warps=WARPS,
        )
    return sums


def results(query: Tensor, keys: Tensor, scale: float, chunk: int, seen: int, period: int) -> Tensor:
    """An empty tensor for the sums, which is all that tensors without data need."""
    return query.new_empty(*query.shape[:2], -(-keys.shape[1] // chunk), dtype=torch.float32)


fused.register_fake(results)


@cache
def kernel() -> Any:
    """The kernel, which Triton compiles at its first call. Made only here, because Triton may not be installed."""
    import triton
    import triton.language as tl

    # These numbers differ from cut to cut; Triton would compile other kernels where 16 divides them.
    @triton.jit(do_not_specialize=["tokens", "seen"])  # type: ignore[untyped-decorator]
    def over_chunks(  # type: ignore[no-untyped-def]
        query,
        keys,
        sums,
        scale,
        queries,
        tokens,
        seen,
        period,
        key_head,
        key_slot,
        ROWS: tl.constexpr,
        KEYS: tl.constexpr,
        CHUNK: tl.constexpr,
        DIM: tl.constexpr,
        HEAD_DIM: tl.constexpr,
    ):
        block, head = tl.program_id(0), tl.program_id(1)
        row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        slot = block * KEYS + tl.arange(0, KEYS)
        dim = tl.arange(0, DIM)
        asking = (row[:, None] < queries) & (dim[None, :] < HEAD_DIM)
        asked = tl.load(query + (head * queries + row[:, None]) * HEAD_DIM + dim[None, :], mask=asking, other=0.0)
        # Offsets within a large pool may exceed 32 bits.
        place = head.to(tl.int64) * key_head + slot.to(tl.int64)[:, None] * key_slot + dim[None, :]
        there = (slot[:, None] < tokens) & (dim[None, :] < HEAD_DIM)
        some = tl.load(keys + place, mask=there, other=0.0)
        last = tl.minimum(seen + row % period, tokens)
        # Logits are exponents of two, which the hardware computes directly.
        logits = tl.dot(asked, tl.trans(some)) * scale
        logits = tl.where(slot[None, :] < last[:, None], logits, -float("inf"))
        logits = tl.reshape(logits, [ROWS, KEYS // CHUNK, CHUNK])
        most = tl.max(logits, 2)
        peak = tl.where(most > -float("inf"), most, 0.0)
        total = tl.sum(tl.exp2(logits - peak[:, :, None]), 2)
        natural = (peak + tl.log2(total)) * 0.6931471805599453  # times log(2)
        chunks = (tokens + CHUNK - 1) // CHUNK
        chunk = block * (KEYS // CHUNK) + tl.arange(0, KEYS // CHUNK)
        into = sums + (head * queries + row[:, None]) * chunks + chunk[None, :]
        tl.store(into, natural, mask=(row[:, None] < queries) & (chunk[None, :] < chunks))

    return over_chunks
