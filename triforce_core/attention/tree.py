"""Attention of a pass whose last tokens are a tree: each sees itself, the tokens before it on its path, and all keys
before the tree.
"""

from functools import lru_cache

import torch
from torch import Tensor

from triforce_core.attention.base import Kernel, Partial, merge_partials
from triforce_core.attention.cpu_flash import MAX_MASK, cpu_flash, folded
from triforce_core.attention.reference import masked


def over_tree(
    kernel: Kernel, query: Tensor, keys: Tensor, values: Tensor, scale: float, parents: tuple[int, ...]
) -> Partial:
    """As `kernel` with `causal`, where the last tokens are the tree with these `parents` (messages.Tree). The result is
    that of this kernel for the keys before the tokens of the pass, and on a CPU mostly for all keys.
    """
    queries, past = query.shape[1], keys.shape[1] - query.shape[1]
    text = queries - len(parents)
    group = query.shape[0] // keys.shape[0]
    if kernel is cpu_flash and group * queries * keys.shape[1] <= MAX_MASK:
        return folded(query, keys, values, scale, added_mask(group, past, text, parents, query.dtype))
    own = masked(query, keys[:, past:], values[:, past:], scale, unseen(text, parents, query.device))
    return merge_partials([kernel(query, keys[:, :past], values[:, :past], scale, False), own]) if past else own


@lru_cache(maxsize=64)  # all layers of a pass use the same masks, one per sequence
def unseen(text: int, parents: tuple[int, ...], device: torch.device) -> Tensor:
    """[text + tree, text + tree] bool, for so many tokens of a text and the tree that follows them: False where a token
    sees another.
    """
    of_tree: list[list[bool]] = []  # for each token of the tree, those of the tree that it does not see
    for index, parent in enumerate(parents):
        of_tree.append([*of_tree[parent]] if parent >= 0 else [True] * len(parents))
        of_tree[index][index] = False
    found = torch.ones(text + len(parents), text + len(parents), dtype=torch.bool).triu_(1)
    found[text:, text:] = torch.tensor(of_tree)
    return found.to(device)


@lru_cache(maxsize=16)
def added_mask(group: int, past: int, text: int, parents: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[1, 1, group * queries, keys]: what is added to scores, 0 or -inf, with so many keys before the queries' own."""
    hidden = unseen(text, parents, torch.device("cpu"))
    mask = torch.zeros(len(hidden), past + len(hidden), dtype=dtype)
    mask[:, past:].masked_fill_(hidden, -torch.inf)
    return mask.repeat(group, 1)[None, None]
