"""Attention whose ranges of keys are tensors. Captured passes can call it, because its operations depend on no length.

A pass has a constant number of sequences with a constant number of queries each. A query attends to two parts, which
are merged by their log-sum-exps: ranges of the pool, cut into a constant number of items, and the tokens of its own
sequence in the pass up to itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from triforce_core.attention.base import Partial, Scoring

LEAST_KEYS = 256  # per item; with fewer keys, merging the items costs more than reading them


@dataclass(frozen=True, slots=True)
class WorkItems:
    """`splits` items per sequence, or per token; in each, its queries see slots [start, start + length). All int32."""

    starts: Tensor  # [items]
    lengths: Tensor  # [items]; 0: an empty item
    longest: int  # the greatest possible length
    splits: int


# ranged(query [items, queries, kv_heads, head_dim], keys [kv_heads, slots, head_dim], values, scale, items) -> Partial
# with output [items, queries, kv_heads, head_dim] and lse [kv_heads, items, queries]: 0 and -inf for an empty item.
Ranged = Callable[[Tensor, Tensor, Tensor, float, WorkItems], Partial]


def num_splits(workers: int, sequences: int, kv_heads: int, longest: int) -> int:
    """The items per sequence, as many as `workers` read at the same time, each one item of one KV head. With more items
    the last ones would wait for the others.
    """
    return max(1, min(workers // (sequences * kv_heads), longest // LEAST_KEYS))


def cut(ranges: list[tuple[int, int]], splits: int) -> list[tuple[int, int]]:
    """Cut at most `splits` ranges into `splits` pieces (start, length) of `LEAST_KEYS` slots or more; some empty."""
    total = sum(stop - start for start, stop in ranges)
    step = max(LEAST_KEYS, ceil(total / max(1, splits - len(ranges) + 1)))
    pieces = [(first, min(step, stop - first)) for start, stop in ranges for first in range(start, stop, step)]
    return pieces + [(0, 0)] * (splits - len(pieces))


# join(past, query, keys, values, scale, seen, sinks) -> output: `joined_with_own`, or the same compiled.
Join = Callable[[Partial, Tensor, Tensor, Tensor, float, Tensor, Tensor | None], Tensor]
WORD = 31  # bits of a number that says which tokens another sees: they are copied as signed numbers of 32 bits


def seen_of(text: int, parents: tuple[int, ...], words: int) -> list[int]:
    """For so many tokens of a text and the tree that follows them: the tokens that each sees, itself included, as
    `words` numbers each. Bit n of number w stands for token `WORD` * w + n.
    """
    found = [2 ** (index + 1) - 1 for index in range(text)]
    for index, parent in enumerate(parents, text):
        found.append(1 << index | (found[text + parent] if parent >= 0 else 2**text - 1))
    return [seen >> WORD * word & 2**WORD - 1 for seen in found for word in range(words)]


def joined_with_own(
    past: Partial, query: Tensor, keys: Tensor, values: Tensor, scale: float, seen: Tensor, sinks: Tensor | None
) -> Tensor:
    """Merge the result of `over_items` with attention over the few tokens of the pass itself.

    query [kv_heads, group, sequences, queries, head_dim]; keys and values have the same shape without group; `seen`
    [sequences, queries, words] int64: which of its sequence's tokens each sees, as by `seen_of`. Returns [tokens,
    heads, head_dim].
    """
    near_keys, near_values = keys.float().unsqueeze(1), values.float().unsqueeze(1)  # for all query heads of a group
    scores = query.float() @ near_keys.mT * scale
    numbers = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill((seen[..., numbers // WORD] >> numbers % WORD) % 2 == 0, -torch.inf)
    lse = torch.logaddexp(past.lse.logsumexp(0), scores.logsumexp(-1))  # over all keys that a query sees
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().reshape(*lse.shape[:2], 1, 1))
    output = (scores - lse.unsqueeze(-1)).exp() @ near_values
    output = output + ((past.lse - lse).exp().unsqueeze(-1) * past.output).sum(0)
    return output.permute(2, 3, 0, 1, 4).flatten(2, 3).flatten(0, 1).to(query.dtype)


def attend(
    ranged: Ranged,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pool: tuple[Tensor, Tensor],
    scoring: Scoring,
    items: WorkItems,
    seen: Tensor,
    join: Join = joined_with_own,
) -> Tensor:
    """Attention of one pass. query [heads, tokens, head_dim]; keys and values [kv_heads, tokens, head_dim] of the same
    tokens, sequence by sequence; `pool` holds keys and values [kv_heads, slots, head_dim].

    Returns [tokens, heads, head_dim]. The items are those of the sequences, or of the single tokens. Of its sequence's
    tokens each sees those that `seen` [sequences, queries, words] says.
    """
    kv_heads, sequences, readers = keys.shape[0], seen.shape[0], items.lengths.shape[0] // items.splits
    query = query.unflatten(0, (kv_heads, -1))
    past = over_items(ranged, query.unflatten(2, (readers, -1)), *pool, scoring.scale, items)
    past = Partial(*(part.flatten(3, 4).unflatten(3, (sequences, -1)) for part in past))
    own = keys.unflatten(1, (sequences, -1)), values.unflatten(1, (sequences, -1))
    return join(past, query.unflatten(2, (sequences, -1)), *own, scoring.scale, seen, scoring.sinks)


def over_items(ranged: Ranged, query: Tensor, keys: Tensor, values: Tensor, scale: float, items: WorkItems) -> Partial:
    """query [kv_heads, group, readers, queries, head_dim] → output [splits, *query's], and lse the same without
    head_dim.

    The heads of a group are folded into queries, so that KV is read once for all of them.
    """
    kv_heads, group, readers, queries, head_dim = query.shape
    repeated = query.permute(2, 1, 3, 0, 4)[:, None].expand(-1, items.splits, -1, -1, -1, -1)
    each = repeated.reshape(readers * items.splits, group * queries, kv_heads, head_dim)  # one copy
    output, lse = ranged(each, keys, values, scale, items)
    output = output.unflatten(1, (group, queries)).unflatten(0, (readers, items.splits))
    lse = lse.unflatten(2, (group, queries)).unflatten(1, (readers, items.splits))
    return Partial(output.permute(1, 4, 2, 0, 3, 5), lse.permute(2, 0, 3, 1, 4))


def gathered(query: Tensor, keys: Tensor, values: Tensor, scale: float, items: WorkItems) -> Partial:
    """A plain version for any device: copies `longest` slots for every range and masks those beyond its length.

    Masked slots may hold any values, including NaN. See `Ranged` for the shapes.
    """
    offsets = torch.arange(items.longest, device=keys.device)
    slots = (items.starts[:, None] + offsets).clamp(max=keys.shape[1] - 1)
    seen = offsets < items.lengths[:, None]  # [items, longest]
    near_keys, near_values = keys[:, slots].float(), values[:, slots].float()  # [kv_heads, items, longest, head_dim]
    scores = (query.permute(2, 0, 1, 3).float() @ near_keys.mT * scale).masked_fill(~seen[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    shares = (scores - lse.unsqueeze(-1)).exp().masked_fill(~seen[:, None], 0)  # an empty item gives NaN
    output = shares @ near_values.masked_fill(~seen[..., None], 0)
    return Partial(output.permute(1, 2, 0, 3).to(query.dtype), lse)
