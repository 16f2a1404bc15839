"""Trees of continuations, against the set of their paths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.trees import trees
from triforce_core.messages import Tree, chain

tokens_of = st.lists(st.integers(0, 2), max_size=6).map(tuple)


def paths(tree: Tree) -> set[tuple[int, ...]]:
    return {tuple(tree.path(index)) for index in range(-1, len(tree.tokens))}


def follow(tree: Tree, tokens: tuple[int, ...]) -> int:
    """The number of these tokens that the tree has, where each goes on from the first of equal siblings."""
    at = -1
    for count, token in enumerate(tokens):
        found = tree.child(at, token)
        if found is None:
            return count
        at = found
    return len(tokens)


@given(trees())
def test_depths_are_the_lengths_of_paths(tree: Tree) -> None:
    assert tree.depths == [len(tree.path(index)) - 1 for index in range(len(tree.tokens))]


@given(trees(), tokens_of)
def test_what_is_followed_is_a_path(tree: Tree, tokens: tuple[int, ...]) -> None:
    count = follow(tree, tokens)
    assert tokens[:count] in paths(tree)
    if len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree.tokens):  # no equal siblings
        assert count == max(n for n in range(len(tokens) + 1) if tokens[:n] in paths(tree))


@given(trees(), tokens_of)
def test_tokens_are_rejected_where_others_were_proposed(tree: Tree, tokens: tuple[int, ...]) -> None:
    count, at = follow(tree, tokens), -1
    for token in tokens[:count]:
        child = tree.child(at, token)
        assert child is not None
        at = child
    assert tree.rejects(tokens) == (count < len(tokens) and at in tree.parents)


@given(trees(), st.integers(0, 5), st.integers(0, 2))
def test_what_is_cut_off_takes_what_follows_it_along(tree: Tree, room: int, barred: int) -> None:
    kept = tree.kept(lambda token, depth: depth < room and token != barred)
    assert paths(kept) == {path for path in paths(tree) if len(path) <= room and barred not in path}
    assert all(parent < index for index, parent in enumerate(kept.parents))


@given(trees())
def test_the_first_path_is_a_chain_that_ends_at_a_leaf(tree: Tree) -> None:
    first = tree.first_path()
    assert first.is_chain
    assert first.tokens in paths(tree)
    assert first == tree or not tree.is_chain
    at = -1
    for token in first.tokens:
        at = tree.parents.index(at)
        assert tree.tokens[at] == token
    assert at not in tree.parents


def test_a_chain_is_a_tree() -> None:
    assert chain((5, 6, 7)) == Tree((5, 6, 7), (-1, 0, 1))
    assert chain((5, 6, 7)).is_chain
    assert not Tree((5, 6, 7), (-1, -1, 1)).is_chain
