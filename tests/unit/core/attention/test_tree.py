"""A token of a tree sees what it would see if its path were the text."""

from __future__ import annotations

import random

import pytest
import torch

from tests.trees import any_parents, before
from triforce_core.attention import KERNELS, over_tree, tree_mask
from triforce_core.attention.reference import reference

HEAD_DIM, SCALE = 16, 0.3


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("past", "text", "nodes"), [(0, 0, 1), (0, 1, 5), (40, 0, 9), (300, 3, 20)])
@pytest.mark.parametrize("name", ["cpu_flash", "reference", "blocked"])
def test_a_token_sees_its_path_alone(name: str, past: int, text: int, nodes: int, group: int) -> None:
    numbers, parents = torch.Generator().manual_seed(nodes), any_parents(random.Random(past), nodes)
    queries = text + nodes
    query = torch.randn(2 * group, queries, HEAD_DIM, generator=numbers)
    keys, values = torch.randn(2, 2, past + queries, HEAD_DIM, generator=numbers)
    mask = tree_mask(KERNELS[name], query, keys, parents)
    found = over_tree(KERNELS[name], query, keys, values, SCALE, mask)
    for index in range(queries):
        visible = [*range(past), *(past + other for other in before(text, parents, index))]
        expected = reference(query[:, [index]], keys[:, visible], values[:, visible], SCALE, False)
        torch.testing.assert_close(found.output[:, [index]], expected.output, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.lse[:, [index]], expected.lse, atol=1e-5, rtol=0)
