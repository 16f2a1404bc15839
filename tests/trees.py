"""Trees of continuations, drawn at random."""

from __future__ import annotations

import random

import torch
from hypothesis import strategies as st
from torch import Tensor

from triforce_core.attention.ranged import WORD, seen_of
from triforce_core.messages import Tree


def any_parents(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(-1, index) for index in range(count))


@st.composite
def trees(draw: st.DrawFn, most: int = 12, vocab_size: int = 3) -> Tree:
    """Siblings may be equal, as those of a tier that errs."""
    count = draw(st.integers(0, most))
    tokens = draw(st.tuples(*[st.integers(0, vocab_size - 1)] * count))
    return Tree(tokens, tuple(draw(st.integers(-1, index - 1)) for index in range(count)))


def before(text: int, parents: tuple[int, ...], index: int) -> list[int]:
    """What a token of a pass sees, itself last: of so many tokens of a text and the tree that follows them."""
    if index < text:
        return [*range(index + 1)]
    parent = parents[index - text]
    return [*(before(text, parents, text + parent) if parent >= 0 else range(text)), index]


def seen(queries: int, trees_of: list[tuple[int, ...]]) -> Tensor:
    """As `ranged.attend` takes it, for sequences whose last tokens are these trees."""
    words = -(-queries // WORD)
    numbers = [n for parents in trees_of for n in seen_of(queries - len(parents), parents, words)]
    return torch.tensor(numbers).unflatten(0, (-1, queries, words))
