"""Attention in which the bits of a query's result depend on the query and on the keys up to its own alone, whatever
else is in the pass (docs/decisions/0032-bits.md).

Keys are cut into blocks at fixed positions of the text. Each block of a query is attended to by itself, and the blocks
are merged in an order that depends on their number alone. Every other operation works on single elements.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from triforce_core.attention.base import Partial

BLOCK = 512  # keys; PyTorch's operator takes as many in one step, so it does not split a block again
# The query heads of a KV head and their queries are rows, a multiple of this number of them: in bfloat16, and in other
# dtypes. PyTorch's operator takes a multiple of 32 rows at a time, and computes the rest in another way if they are
# few: less than 4; and where its products are float32, on Intel's processors with AMX, 4 with heads of 96 or 128, and 8
# with heads of 256.
ROWS, MORE_ROWS = 4, 16
MOST_MERGED = 1 << 19  # elements of the blocks' results that a CPU merges at once: they fit its caches
MOST_RESULTS = 1 << 25  # elements of the blocks' results at one time


def most_queries(heads: int, head_dim: int, blocks: int, *, together: bool = False) -> int:
    """How many queries attend to this number of blocks at once, so that their results take bounded memory. `together`:
    of several texts that share the blocks, whose results are kept longer, but which would read them several times.
    """
    return (4 if together else 1) * MOST_RESULTS // (heads * head_dim * max(1, blocks))


def in_rows(query: Tensor, kv_heads: int, dtype: torch.dtype | None = None) -> Tensor:
    """[..., heads, queries, n] → [..., kv_heads, rows, n], with rows of zeros behind the last query. `dtype`: the
    queries', where this is another tensor for the same rows.
    """
    rows = query.reshape(*query.shape[:-3], kv_heads, -1, query.shape[-1])
    padding = -rows.shape[-2] % (ROWS if (dtype or rows.dtype) is torch.bfloat16 else MORE_ROWS)
    if not padding:
        return rows
    return torch.cat([rows, rows.new_zeros(*rows.shape[:-2], padding, rows.shape[-1])], dim=-2)


def of_heads(rows: Tensor, heads: int, queries: int) -> Tensor:
    """[..., kv_heads, rows, n] → [..., heads, queries, n]: undoes `in_rows`."""
    used = rows[..., : heads * queries // rows.shape[-3], :]
    return used.reshape(*rows.shape[:-3], heads, queries, rows.shape[-1])


def over_blocks(rows: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None) -> Partial:
    """Attention over each block: rows [kv_heads, rows, head_dim], keys and values [blocks, kv_heads, BLOCK, head_dim].
    Returns output [blocks, kv_heads, rows, head_dim] and lse [blocks, kv_heads, rows].

    `mask`: as by `future`. What it hides may be anything whose products are finite.
    """
    query = rows.expand(len(keys), -1, -1, -1)
    return (by_operator if rows.device.type == "cpu" else by_products)(query, keys, values, scale, mask)


def by_operator(query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None) -> Partial:
    """`over_blocks` on a CPU; `query` as the output."""
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    return Partial(*found)


def by_products(query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None) -> Partial:
    """The same on any device."""
    scores = query.float() @ keys.float().mT * scale
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    return Partial(((scores - lse.unsqueeze(-1)).exp() @ values.float()).to(query.dtype), lse)


def future(first: int, queries: int, rows: Tensor) -> Tensor:
    """[1, 1, rows, BLOCK]: -inf at keys that follow a query's own, else 0, for the rows of queries of the tokens from
    index `first` of the block on.
    """
    own = rows.new_full((queries, BLOCK), -torch.inf).triu_(first + 1)
    return own.repeat(-(-rows.shape[1] // queries), 1)[None, None, : rows.shape[1]]


def past(first: int, queries: int, rows: Tensor) -> Tensor:
    """As `future`: -inf at keys before the window of a query; the first query's window begins at index `first`."""
    before = rows.new_full((queries, BLOCK), -torch.inf).tril_(first - 1)
    return before.repeat(-(-rows.shape[1] // queries), 1)[None, None, : rows.shape[1]]


def merged(parts: list[Partial], sinks: Sequence[Tensor] = ()) -> Tensor:
    """Merge the results over the blocks of a text, in the order of their positions: [kv_heads, rows, head_dim].
    `sinks`: one tensor [1, kv_heads, rows] with the learned sinks of the rows, or none.
    """
    if sum(len(part.output) for part in parts) == 1 and not sinks:
        return parts[0].output[0]
    # Along the last dimension, each row's softmax is computed by itself.
    lses = torch.cat([*(part.lse for part in parts), *sinks]).permute(1, 2, 0)
    shares = lses.softmax(-1).permute(2, 0, 1).unsqueeze(-1)[: lses.shape[-1] - len(sinks)]
    found = torch.empty_like(parts[0].output[0])
    most = MOST_MERGED if found.device.type == "cpu" else MOST_RESULTS
    step = max(1, most // (len(shares) * found[:, 0].numel()))
    for some in (slice(first, first + step) for first in range(0, found.shape[1], step)):
        terms = torch.cat([part.output[:, :, some] for part in parts]) * shares[:, :, some]
        found[:, some] = summed(terms)  # rounded to the model's dtype
    return found


def summed(terms: Tensor) -> Tensor:
    """The sum over the first dimension, in which the last half is added to the first until one is left. Overwrites
    `terms`. A `sum` of PyTorch adds in an order that depends on the other dimensions.
    """
    count = len(terms)
    while count > 1:
        half = count // 2
        terms[:half].add_(terms[count - half : count])
        count -= half
    return terms[0]
