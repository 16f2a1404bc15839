"""Attention of a pass whose last tokens are a tree: each sees itself, the tokens before it on its path, and all keys
before the tree.
"""

import torch
from torch import Tensor

from triforce_core.attention.base import Kernel, Partial, merge_partials
from triforce_core.attention.cpu_flash import MAX_MASK, cpu_flash, folded
from triforce_core.attention.reference import masked
from triforce_core.transfer import on_device


def tree_mask(kernel: Kernel, query: Tensor, keys: Tensor, parents: tuple[int, ...]) -> Tensor:
    """What `over_tree` takes for these shapes, of whatever layer, where the last tokens are the tree with these
    `parents` (messages.Tree): [queries, queries] bool, False where a token sees another; or [1, 1, rows, keys] of the
    query's dtype, what is added to scores, where the CPU's operator attends to all keys at once.
    """
    queries, num_keys, group = query.shape[1], keys.shape[1], query.shape[0] // keys.shape[0]
    text, of_tree = queries - len(parents), list[list[bool]]()
    for index, parent in enumerate(parents):
        of_tree.append([*of_tree[parent]] if parent >= 0 else [True] * len(parents))
        of_tree[index][index] = False
    hidden = torch.ones(queries, queries, dtype=torch.bool, device=query.device).triu_(1)
    hidden[text:, text:] = on_device(of_tree, torch.bool, query.device)
    if kernel is not cpu_flash or group * queries * num_keys > MAX_MASK:
        return hidden
    mask = torch.zeros(queries, num_keys, dtype=query.dtype)
    mask[:, num_keys - queries :].masked_fill_(hidden, -torch.inf)
    return mask.repeat(group, 1)[None, None]


def over_tree(kernel: Kernel, query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor) -> Partial:
    """As `kernel` with `causal`, for a pass whose last tokens are a tree; `mask`: of `tree_mask`."""
    if mask.dim() == 4:
        return folded(query, keys, values, scale, mask)
    past = keys.shape[1] - query.shape[1]
    own = masked(query, keys[:, past:], values[:, past:], scale, mask)
    return merge_partials([kernel(query, keys[:, :past], values[:, :past], scale, False), own]) if past else own
