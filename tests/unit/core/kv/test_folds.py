"""Ranges that several rows of a pass see are read once: what is planned, and that attention does not change by it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.random_models import Pair, plain_logits, random_pair, random_tokens
from tests.stating import Statement, ask, assert_logits, full_kv, full_runner, geometry, spec
from triforce_core.attention import KERNELS, ON_CUDA, Partial, Scoring, gathered
from triforce_core.kv import offloaded
from triforce_core.kv.base import Batch, KVCache, KVGeometry, Placement, Row
from triforce_core.kv.copy_stream import copy_slots
from triforce_core.kv.folds import LEAST_KEYS, MOST_QUERIES, Fold, Reading, plan
from triforce_core.kv.full import FullKV
from triforce_core.kv.offloaded import Offload, OffloadedKV
from triforce_core.kv.ranges import Range, size_of, without
from triforce_core.kv.shaped import PassShape, VerifyBatch
from triforce_core.models.graphs import EagerPass, ShapedPasses
from triforce_core.models.runner import ModelRunner

K = LEAST_KEYS
FEW, MANY = 9, MOST_QUERIES + 1


@pytest.mark.parametrize(
    ("visible", "queries", "folds", "alone"),
    [
        ([], [], [], []),
        ([[]], [5], [], [[]]),
        ([[(0, 9 * K)]], [1], [], [[(0, 9 * K)]]),
        ([[(0, K)], [(K, 2 * K)]], [1, 1], [], [[(0, K)], [(K, 2 * K)]]),
        ([[(0, K)], [], [(0, K)]], [1, 1, 1], [((0, K), (0, 2))], [[], [], []]),
        # The first wrote the document, and its own text continues it; the others' texts are elsewhere.
        (
            [[(0, 3 * K + 7)], [(0, 3 * K), (9 * K, 9 * K + 5)], [(0, 3 * K)]],
            [FEW, 1, 1],
            [((0, 3 * K), (0, 1, 2))],
            [[(3 * K, 3 * K + 7)], [(9 * K, 9 * K + 5)], []],
        ),
        # Three share a document, and two of them more of it, after slots that are elsewhere.
        (
            [[(5 * K, 9 * K), (0, 2 * K)], [(5 * K, 9 * K)], [(5 * K, 9 * K), (0, K), (20 * K, 21 * K)]],
            [1, 1, 1],
            [((0, K), (0, 2)), ((5 * K, 9 * K), (0, 1, 2))],
            [[(K, 2 * K)], [], [(20 * K, 21 * K)]],
        ),
        # Two pieces that lie one behind the other are one range, however many pieces each row has them in.
        ([[(0, 10), (10, K)], [(0, K - 1), (K - 1, K)]], [1, 1], [((0, K), (0, 1))], [[], []]),
        ([[(0, K - 1)], [(0, K - 1)]], [1, 1], [], [[(0, K - 1)], [(0, K - 1)]]),
        ([[(0, K)]] * 3, [1, MANY, MOST_QUERIES], [((0, K), (0, 2))], [[], [(0, K)], []]),
        ([[(0, K)]] * 2, [1, MANY], [], [[(0, K)], [(0, K)]]),
    ],
)
def test_what_is_planned(
    visible: list[list[Range]], queries: list[int], folds: list[tuple[Range, tuple[int, ...]]], alone: list[list[Range]]
) -> None:
    assert plan(visible, queries) == Reading([Fold(*fold) for fold in folds], alone)


STEP = 90  # slots: three steps are enough for a fold
rows_of_ranges = st.lists(
    st.lists(st.booleans(), min_size=20, max_size=20).flatmap(
        lambda seen: st.permutations([(i * STEP, (i + 1) * STEP) for i, sees in enumerate(seen) if sees])
    ),
    max_size=5,
)


@given(rows_of_ranges, st.data())
def test_each_row_reads_what_it_sees_once_and_what_is_worth_it_together(
    visible: list[list[Range]], data: st.DataObject
) -> None:
    queries = [data.draw(st.sampled_from([1, FEW, MOST_QUERIES, MANY])) for _ in visible]
    reading = plan(visible, queries)
    for row, (ranges, alone) in enumerate(zip(visible, reading.alone, strict=True)):
        read = [*alone, *(fold.keys for fold in reading.folds if row in fold.rows)]
        assert Counter(slots_of(read)) == Counter(slots_of(ranges))
    seen, folded = sum(map(size_of, visible)), [(size_of([fold.keys]), len(fold.rows)) for fold in reading.folds]
    assert reading.share * seen == pytest.approx(seen - sum(keys * (rows - 1) for keys, rows in folded))
    able = [set(slots_of(ranges)) for ranges, count in zip(visible, queries, strict=True) if count <= MOST_QUERIES]
    together = {slot for fold in reading.folds for slot in slots_of([fold.keys])}
    for fold in reading.folds:
        assert len(fold.rows) > 1
        assert size_of([fold.keys]) >= LEAST_KEYS
    by_slot = [frozenset(i for i, slots in enumerate(able) if slot in slots) for slot in range(20 * STEP)]
    edges = [0, *(slot for slot in range(1, 20 * STEP) if by_slot[slot] != by_slot[slot - 1]), 20 * STEP]
    for start, stop in pairwise(edges):
        worth_it = len(by_slot[start]) > 1 and stop - start >= LEAST_KEYS
        assert all((slot in together) == worth_it for slot in range(start, stop))


def slots_of(ranges: list[Range]) -> list[int]:
    return [slot for start, stop in ranges for slot in range(start, stop)]


class CountingKernel:
    """A kernel that counts its calls, and the keys that they read."""

    def __init__(self, name: str = "cpu_flash") -> None:
        self.kernel, self.calls, self.keys = KERNELS[name], 0, 0

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
        self.calls, self.keys = self.calls + 1, self.keys + keys.shape[1]
        return self.kernel(query, keys, values, scale, causal)


POOL, HEADS, DIM = 20 * STEP, 4, 16


@given(
    rows_of_ranges,
    st.data(),
    st.sampled_from([name for name in KERNELS if name not in ON_CUDA]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 10**6),
)
def test_attention_is_the_same_as_where_each_row_reads_alone(
    visible: list[list[Range]], data: st.DataObject, kernel: str, kv_heads: int, seed: int
) -> None:
    """Rows are ragged, heads are grouped, and some rows see nothing yet. The new tokens' slots are in one piece or two,
    and may continue what the row sees.
    """
    shape = KVGeometry(1, kv_heads, DIM, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    pools = torch.randn(1, 2, kv_heads, POOL + 5 * 64, DIM, generator=generator)
    rows: list[Row] = []
    for i, ranges in enumerate(visible):
        count, first = data.draw(st.integers(1, 17)), POOL + i * 64
        writes = [(first, first + count)]
        if count > 1 and data.draw(st.booleans()):
            writes = [(first, first + 1), (first + 30, first + 29 + count)]
        rows.append(
            Row(i, rows[-1].stop if rows else 0, Placement([0] * count, range(count), writes, ranges), num_sampled=0)
        )
    if not rows:
        return
    tokens = rows[-1].stop
    query = 2 * torch.randn(HEADS, tokens, DIM, generator=generator)
    keys, values = torch.randn(2, kv_heads, tokens, DIM, generator=generator)

    def attended(reading: Reading | None) -> tuple[Tensor, Tensor]:
        own = pools.clone()
        cache = FullKV(shape, POOL, KERNELS[kernel], [own])
        batch = Batch(cache, rows, reading=reading)
        return KVCache.attend(cache, 0, query, keys, values, Scoring(DIM**-0.5), batch), own

    expected, pool = attended(None)
    found, same_pool = attended(plan(visible, [len(row.placed.tokens) for row in rows]))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert torch.equal(same_pool, pool)


@pytest.fixture(scope="module", params=[1, 2, 4], ids="kv_heads={}".format)
def pair(request: pytest.FixtureRequest) -> Pair:
    return random_pair(num_key_value_heads=request.param)


DOCUMENT, LONGER = random_tokens(600, seed=1), random_tokens(300, seed=2)


def share(kv: KVCache, owner: int, sequence_id: int, tokens: tuple[int, ...]) -> None:
    """Open a sequence whose first slots are another's, of the same tokens."""
    lent, length = kv.held[owner].ranges, len(tokens)
    assert kv.held[owner].tokens[:length] == list(tokens)
    assert isinstance(kv, FullKV)
    held = kv.open(sequence_id, spec(2000), 64)
    assert held is not None
    held.ranges = [*without(lent, after(lent, length)), *held.ranges]
    held.tokens, held.cached = list(tokens), length


def after(ranges: list[Range], tokens: int) -> list[Range]:
    """The slots after the first `tokens` slots."""
    [(start, stop), *rest] = ranges
    assert stop - start >= tokens
    return [(start + tokens, stop), *rest]


def three_that_share(runner: ModelRunner) -> dict[int, tuple[int, ...]]:
    """Sequences 1 to 3 share a document, and 1 and 2 share more; 4 has a text of its own. Their texts so far."""
    texts = {1: DOCUMENT + LONGER, 2: DOCUMENT + LONGER, 3: DOCUMENT, 4: random_tokens(40, seed=4)}
    ask(runner, Statement(1, texts[1], 1), Statement(4, texts[4], 1), max_length=1000)
    kv = runner.kv
    assert isinstance(kv, KVCache)
    share(kv, 1, 2, texts[2])
    share(kv, 1, 3, texts[3])
    return texts


def decode(runner: ModelRunner, pair: Pair, texts: dict[int, tuple[int, ...]], steps: int = 4) -> None:
    """Take steps of 1 to 17 tokens in ragged rows. The logits must be those of the texts alone."""
    for step in range(steps):
        for i in texts:
            texts[i] += random_tokens((1, 3, 9, 17)[(step + i) % 4], seed=100 * step + i)
        counts = {i: (1, 3, 9, 17)[(step + i) % 4] for i in texts}
        answers = ask(runner, *(Statement(i, text, counts[i]) for i, text in texts.items()), max_length=1000)
        for i, text in texts.items():
            assert_logits(answers[i], plain_logits(pair.theirs, text)[-counts[i] :])


def test_sequences_that_share_slots_give_the_logits_of_their_texts(pair: Pair) -> None:
    runner = full_runner(pair, 3000)
    decode(runner, pair, three_that_share(runner))


def test_passes_of_constant_shape_read_shared_slots_rightly_too(pair: Pair) -> None:
    """These passes do not fold. The items of each sequence read all slots that it sees."""
    runner = full_runner(pair, 3000)
    kv = full_kv(runner)
    texts = three_that_share(runner)
    queries = torch.empty(len(kv.keys), HEADS, 4 * 17, kv.geometry.head_dim)
    batch = VerifyBatch(kv, PassShape(4, 17), 1000, gathered, 4, queries)
    runner.shaped = ShapedPasses([EagerPass(pair.ours, batch)])
    ordinary = runner.run
    runner.run = pytest.fail  # type: ignore[method-assign, assignment]
    decode(runner, pair, texts, steps=2)
    assert runner.read == 1
    runner.shaped, runner.run = None, ordinary  # type: ignore[method-assign]
    decode(runner, pair, texts, steps=1)


def test_a_shared_document_is_read_once_a_pass(pair: Pair) -> None:
    """Eight sequences share one document. Each layer has one call for the document and one for each sequence's own
    tokens.
    """
    runner = full_runner(pair, 3000)
    kv = full_kv(runner)
    texts = {1: DOCUMENT}
    ask(runner, Statement(1, DOCUMENT, 1), max_length=1000)
    for i in range(2, 9):
        texts[i] = DOCUMENT
        share(kv, 1, i, DOCUMENT)
    kernel = CountingKernel()
    kv.kernel = kernel
    ask(runner, *(Statement(i, (*text, i)) for i, text in texts.items()), max_length=1000)
    layers = len(kv.keys)
    assert kernel.keys == layers * (600 + 8)
    assert kernel.calls == layers * (1 + 8)
    assert runner.read == pytest.approx(1 / 8)
    ask(runner, Statement(1, (*DOCUMENT, 1, 2)), max_length=1000)
    assert runner.read == 1


def test_a_shared_range_crosses_the_link_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = random_pair()
    kv = OffloadedKV(geometry(pair), 3000, KERNELS["cpu_flash"], Offload(0))
    runner = ModelRunner(pair.ours, kv)
    texts = three_that_share(runner)
    crossed = {"to the device": 0, "to the host": 0}

    def counted(source: Tensor, into: Tensor, ranges: list[Range]) -> None:
        to_host = into.untyped_storage().data_ptr() == kv.host.untyped_storage().data_ptr()
        crossed["to the host" if to_host else "to the device"] += size_of(ranges)
        copy_slots(source, into, ranges)

    monkeypatch.setattr(offloaded, "copy_slots", counted)
    for staging in kv.staging:
        staging.pool.fill_(torch.nan)
    answers = ask(runner, *(Statement(i, (*text, i)) for i, text in texts.items()), max_length=1000)
    layers = len(kv.keys)
    assert crossed == {"to the device": layers * (900 + 40), "to the host": layers * 4}
    for i, text in texts.items():
        assert_logits(answers[i], plain_logits(pair.theirs, (*text, i))[-1:])
    decode(runner, pair, texts, steps=2)
