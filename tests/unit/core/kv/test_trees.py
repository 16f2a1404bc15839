"""Passes with trees: each node's logits are those of its path as a text, and the cache is none the worse afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from torch import Tensor

from tests.random_models import Pair, plain_logits, random_pair, random_tokens
from tests.stating import assert_logits, geometry, spec
from tests.trees import any_parents
from tests.unit.core.kv.test_retrieval_kv import BUDGET, TAIL, snapshot_of, sparse_logits
from triforce_core.attention import KERNELS
from triforce_core.attention.ranged import gathered
from triforce_core.kv.base import NO_TREE, Forward, Lack
from triforce_core.kv.fixed import FixedKV
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.shaped import PassShape, ShapedBatch
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.kv.streaming import StreamingHeld, StreamingKV, WindowSettings
from triforce_core.messages import Span, Tree
from triforce_core.models.graphs import EagerPass, ShapedPasses
from triforce_core.models.load import ATTENTION
from triforce_core.models.runner import ModelRunner

WINDOW = WindowSettings(4, 24, 20)
NODES = 14


@pytest.fixture(scope="module")
def pair() -> Pair:
    return random_pair(num_key_value_heads=2)


def ordinary(pair: Pair, kv: FixedKV) -> ModelRunner:
    return ModelRunner(pair.ours, kv)


def constant(pair: Pair, kv: FixedKV) -> ModelRunner:
    """Passes have constant shapes, as they are captured on a GPU; one has more tokens than a word has bits."""
    pair.ours.set_attn_implementation(ATTENTION)
    shapes = [PassShape(2, queries) for queries in (1, NODES + 4, 40)]
    batches = [ShapedBatch(kv, shape, kv.slots_each, gathered, workers=1) for shape in shapes]
    return ModelRunner(pair.ours, kv, shaped=ShapedPasses([EagerPass(pair.ours, batch) for batch in batches]))


def any_tree(rng: random.Random, most: int = NODES) -> Tree:
    count = rng.randrange(1, most + 1)
    return Tree(random_tokens(count, seed=rng.randrange(10**6)), any_parents(rng, count))


def asked(runner: ModelRunner, *forwards: Forward) -> list[Tensor]:
    logits, batch = runner.forward([*forwards])
    assert not batch.lacking
    return [*logits.split([row.num_sampled for row in batch.rows])]


@pytest.mark.parametrize("of", [ordinary, constant])
@pytest.mark.parametrize("window", [WINDOW, WindowSettings(4, 8, 6)], ids=["", "small"])
def test_the_window_sees_a_tree(pair: Pair, of: Callable[[Pair, FixedKV], ModelRunner], window: WindowSettings) -> None:
    """While the text grows, and the window moves, with any number of nodes asked for; two sequences in a pass."""
    rng, runner = random.Random(1), of(pair, StreamingKV(geometry(pair), 2, window, KERNELS["cpu_flash"]))
    most = min(NODES, runner.kv.most_nodes)
    texts = {1: random_tokens(3, seed=1), 2: random_tokens(50, seed=2)}
    starts: set[int] = set()
    for _ in range(40):
        forwards, expected = [], []
        for i, text in texts.items():
            tree = any_tree(rng, most) if rng.random() < 0.8 else NO_TREE
            sampled = rng.randrange(1, len(tree.tokens) + 2)
            forwards.append(Forward(Span(i, 0, text, spec(1000)), sampled, tree=tree))
        found = asked(runner, *forwards)
        for forward, logits in zip(forwards, found, strict=True):
            held, text, tree = runner.kv.held[forward.span.sequence_id], forward.span.tokens, forward.tree
            assert isinstance(held, StreamingHeld)
            starts.add(held.window_start)
            visible = text[: window.sinks] + text[held.window_start :]
            paths = [*range(-1, len(tree.tokens))][-forward.num_sampled :]
            expected = [plain_logits(pair.theirs, visible + tuple(tree.path(node)))[-1] for node in paths]
            for row, theirs in zip(logits, expected, strict=True):
                assert_logits(row, theirs)
        for i, text in texts.items():
            kept = text[: max(1, len(text) - rng.choice([0, 0, 2]))]
            texts[i] = kept + random_tokens(rng.randrange(1, 4), seed=rng.randrange(10**6))
    assert len(starts) > 4, "the windows were meant to move"


@pytest.mark.parametrize("of", [ordinary, constant])
def test_the_tail_of_a_snapshot_sees_a_tree(pair: Pair, of: Callable[[Pair, FixedKV], ModelRunner]) -> None:
    rng, kv = (
        random.Random(2),
        RetrievalKV(geometry(pair), 2, ChunkSettings(BUDGET), TAIL + NODES, KERNELS["cpu_flash"]),
    )
    runner, text = of(pair, kv), random_tokens(100, seed=3)
    chosen = sorted(rng.sample(range(90), BUDGET))
    kv.deliver(snapshot_of(pair, text[:90], chosen))
    for end in (91, 92, 95, 95, 93, 100):
        tree = any_tree(rng)
        [found] = asked(runner, Forward(Span(1, 0, text[:end], spec(200)), len(tree.tokens) + 1, tree=tree))
        for node in range(-1, len(tree.tokens)):
            expected = sparse_logits(pair, text[:end] + tuple(tree.path(node)), 90, chosen)[-1]
            assert_logits(found[node + 1], expected)
        [after] = asked(runner, Forward(Span(1, 0, text[:end], spec(200)), 1))
        assert_logits(after[0], found[0])


def test_a_tree_for_which_the_tail_has_no_room_wants_a_snapshot(pair: Pair) -> None:
    kv = RetrievalKV(geometry(pair), 2, ChunkSettings(BUDGET), TAIL, KERNELS["cpu_flash"])
    runner, text = ordinary(pair, kv), random_tokens(100, seed=3)
    kv.deliver(snapshot_of(pair, text[:80], [*range(BUDGET)]))
    for end, room in ((80 + TAIL - 5, True), (80 + TAIL - 4, False)):
        tree = Tree((1, 2, 3, 4, 5), (-1, -1, 0, 0, 1))
        forward = Forward(Span(1, 0, text[:80] + text[: end - 80], spec(200)), 6, tree=tree)
        lacking = runner.forward([forward])[1].lacking
        assert lacking == ({} if room else {1: Lack(snapshot_wanted=True)})
