"""Attention whose ranges of keys are tensors: what a captured pass can call, for nothing of it depends on a length.

A pass has a constant number of sequences with a constant number of queries each. What a query sees is in two parts,
merged by their log-sum-exps: a range of the pool, which is cut into as many items as the device has room for, and the
pass's own tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from triforce_core.attention.base import Partial

LEAST_KEYS = 256  # of an item: with fewer, what is merged costs more than what is read


@dataclass(frozen=True, slots=True)
class WorkItems:
    """For each sequence `splits` items: its queries see slots [start, start + length) of the pool. All int32."""

    starts: Tensor  # [items + 1]; the last is of no meaning
    lengths: Tensor  # [items]; 0: an empty item
    query_starts: Tensor  # [items + 1]: the items' queries lie one after another
    longest: int  # that a length can be
    splits: int


# ranged(query [items, queries, kv_heads, head_dim], keys [kv_heads, slots, head_dim], values, scale, items) -> Partial
# of output [items, queries, kv_heads, head_dim] and lse [kv_heads, items, queries]; of an empty item 0 and -inf.
Ranged = Callable[[Tensor, Tensor, Tensor, float, WorkItems], Partial]


def num_splits(workers: int, sequences: int, kv_heads: int, longest: int) -> int:
    """Items a sequence, so that `workers`, such as a GPU's multiprocessors, all have one to read."""
    return max(1, min(ceil(workers / (sequences * kv_heads)), longest // LEAST_KEYS))


def cut(ranges: list[tuple[int, int]], splits: int) -> list[tuple[int, int]]:
    """The ranges [start, stop), at most `splits`, in as many pieces (start, length), which may be empty.

    Of at least `LEAST_KEYS` each, while a range lasts.
    """
    total = sum(stop - start for start, stop in ranges)
    step = max(LEAST_KEYS, ceil(total / max(1, splits - len(ranges) + 1)))
    pieces = [(first, min(step, stop - first)) for start, stop in ranges for first in range(start, stop, step)]
    return pieces + [(0, 0)] * (splits - len(pieces))


# join(past, query, keys, values, scale) -> output: `joined_with_own`, or the same compiled.
Join = Callable[[Partial, Tensor, Tensor, Tensor, float], Tensor]


def joined_with_own(past: Partial, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Attention over what `over_items` gave and over the few tokens of the pass itself, causally among these.

    query [kv_heads, group, sequences, queries, head_dim], keys and values the same without a group; the output is
    [tokens, heads, head_dim].
    """
    near_keys, near_values = keys.float().unsqueeze(1), values.float().unsqueeze(1)  # for all heads of a group
    scores = query.float() @ near_keys.mT * scale
    numbers = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill(numbers > numbers[:, None], -torch.inf)
    lse = torch.logaddexp(past.lse.logsumexp(0), scores.logsumexp(-1))  # over all that a query sees
    output = (scores - lse.unsqueeze(-1)).exp() @ near_values
    output = output + ((past.lse - lse).exp().unsqueeze(-1) * past.output).sum(0)
    return output.permute(2, 3, 0, 1, 4).flatten(2, 3).flatten(0, 1).to(query.dtype)


def attend(
    ranged: Ranged,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pool: tuple[Tensor, Tensor],
    scale: float,
    items: WorkItems,
    join: Join = joined_with_own,
) -> Tensor:
    """query [heads, tokens, head_dim], and keys and values [kv_heads, tokens, head_dim] of the same tokens, which are
    those of the first sequence, then of the next; the pool's keys and values [kv_heads, slots, head_dim].

    Returns [tokens, heads, head_dim]. Each token sees its sequence's items and, of its own sequence, no later token.
    """
    kv_heads, sequences = keys.shape[0], items.lengths.shape[0] // items.splits
    query = query.unflatten(1, (sequences, -1)).unflatten(0, (kv_heads, -1))
    past = over_items(ranged, query, *pool, scale, items)
    own = keys.unflatten(1, (sequences, -1)), values.unflatten(1, (sequences, -1))
    return join(past, query, *own, scale)


def over_items(ranged: Ranged, query: Tensor, keys: Tensor, values: Tensor, scale: float, items: WorkItems) -> Partial:
    """query [kv_heads, group, sequences, queries, head_dim] → output [splits, *query's], lse the same but head_dim.

    The heads of a group are folded into queries, so that KV is read once for all of them.
    """
    kv_heads, group, sequences, queries, head_dim = query.shape
    repeated = query.permute(2, 1, 3, 0, 4)[:, None].expand(-1, items.splits, -1, -1, -1, -1)
    each = repeated.reshape(sequences * items.splits, group * queries, kv_heads, head_dim)  # one copy
    output, lse = ranged(each, keys, values, scale, items)
    output = output.unflatten(1, (group, queries)).unflatten(0, (sequences, items.splits))
    lse = lse.unflatten(2, (group, queries)).unflatten(1, (sequences, items.splits))
    return Partial(output.permute(1, 4, 2, 0, 3, 5), lse.permute(2, 0, 3, 1, 4))


def gathered(query: Tensor, keys: Tensor, values: Tensor, scale: float, items: WorkItems) -> Partial:
    """The textbook, on any device: copies every range in its greatest length, and masks what is beyond its own.

    What is not seen may hold anything, NaN included. See `Ranged` for the shapes.
    """
    offsets = torch.arange(items.longest, device=keys.device)
    slots = (items.starts[:-1, None] + offsets).clamp(max=keys.shape[1] - 1)
    seen = offsets < items.lengths[:, None]  # [items, longest]
    near_keys, near_values = keys[:, slots].float(), values[:, slots].float()  # [kv_heads, items, longest, head_dim]
    scores = (query.permute(2, 0, 1, 3).float() @ near_keys.mT * scale).masked_fill(~seen[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    shares = (scores - lse.unsqueeze(-1)).exp().masked_fill(~seen[:, None], 0)  # of an empty item: NaN before
    output = shares @ near_values.masked_fill(~seen[..., None], 0)
    return Partial(output.permute(1, 2, 0, 3).to(query.dtype), lse)
