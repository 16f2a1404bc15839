"""The full cache against plain passes of transformers: whatever was said before, the logits are those of the text."""

from __future__ import annotations

import random

import pytest
from torch import Tensor

from tests.random_models import Pair, plain_logits, random_pair, random_tokens
from tests.stating import Statement, ask, assert_logits, fragment, full_runner, spec
from triforce_core.attention import KERNELS, ON_CUDA
from triforce_core.kv.base import Forward, Lack
from triforce_core.kv.full import FullKV
from triforce_core.kv.ranges import size_of
from triforce_core.kv.text_slots import FIRST_GROWTH, MOST_RANGES
from triforce_core.messages import Span


@pytest.fixture(scope="module", params=[1, 2, 4], ids="kv_heads={}".format)
def pair(request: pytest.FixtureRequest) -> Pair:
    return random_pair(num_key_value_heads=request.param)


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name not in ON_CUDA])
@pytest.mark.parametrize("hole", [None, 15, 27], ids="hole={}".format)
def test_any_history_gives_the_logits_of_the_text(pair: Pair, kernel: str, hole: int | None) -> None:
    """Three sequences grow, are rolled back, restated and cut short at random, several in one pass. The free slots of
    the pool are in pieces.
    """
    rng = random.Random(f"{kernel} {hole}")
    runner = full_runner(pair, 500, kernel)
    if hole:
        fragment(runner.kv, hole, 3 * 60)
    texts: dict[int, tuple[int, ...]] = {1: (), 2: (), 3: ()}
    for _ in range(25):
        statements = []
        for sequence_id in rng.sample(sorted(texts), rng.randint(1, 3)):
            kept = rng.choice([len(texts[sequence_id]), rng.randint(0, len(texts[sequence_id]))])
            fresh = random_tokens(rng.randint(0, 12), seed=rng.randrange(10**6))
            text = (texts[sequence_id][:kept] + fresh)[:60] or (1,)
            start = rng.choice([0, kept, rng.randint(0, kept)])
            statements.append(Statement(sequence_id, text, rng.choice([0, 1, rng.randint(1, len(text))]), start))
            texts[sequence_id] = text
        answers = ask(runner, *statements, max_length=60)
        for s in statements:
            if s.sampled:
                assert_logits(answers[s.sequence_id], plain_logits(pair.theirs, s.tokens)[-s.sampled :])
    pieces = [len(held.ranges) for held in runner.kv.held.values()]
    assert not hole or max(pieces) > 1, "the pool was meant to be in pieces"


@pytest.mark.parametrize("chunks", [[100], [1] * 20 + [80], [33, 33, 34], [99, 1]], ids=str)
def test_prefill_in_chunks(pair: Pair, chunks: list[int]) -> None:
    runner, text = full_runner(pair, 200), random_tokens(100, seed=1)
    end = 0
    for chunk in chunks:
        nothing = ask(runner, Statement(1, text[: end + chunk], 0, start=end))[1]
        assert isinstance(nothing, Tensor)
        assert len(nothing) == 0, "no logits are wanted of a prefill chunk, and none computed"
        end += chunk
    assert_logits(ask(runner, Statement(1, text, 5))[1], plain_logits(pair.theirs, text)[-5:])


def test_only_what_is_missing_is_forwarded(pair: Pair) -> None:
    """By the align rule, the longest common prefix is kept. The positions that are laid out show it."""
    runner, text = full_runner(pair, 200), random_tokens(50, seed=2)
    ask(runner, Statement(1, text, 1))

    def forwarded(tokens: tuple[int, ...], start: int, sampled: int) -> range:
        span = Span(1, start, tokens[start:], None if start else spec(200))
        rows = runner.kv.prepare([Forward(span, sampled)]).rows
        return range(rows[0].placed.positions.start, rows[0].placed.positions.stop) if rows else range(0)

    assert forwarded(text, 0, 0) == range(0)
    assert forwarded(text, 0, 1) == range(49, 50)
    assert forwarded(text, 30, 8) == range(42, 50)
    other = (*text[:20], (text[20] + 1) % 256, *text[21:])
    assert forwarded(other, 0, 1) == range(20, 50)
    assert forwarded(text[:10], 5, 0) == range(0)
    assert forwarded(text[:12], 10, 1) == range(10, 12), "what was rolled back is forwarded again"


def test_what_is_not_held_is_missing_from_its_end(pair: Pair) -> None:
    runner, text = full_runner(pair, 300), random_tokens(50, seed=3)
    assert ask(runner, Statement(1, text, 1, start=10)) == {1: Lack(missing_from=0)}
    ask(runner, Statement(1, text[:20], 1))
    answers = ask(runner, Statement(1, text, 1, start=30), Statement(2, text, 1), max_length=60)
    assert answers[1] == Lack(missing_from=20)
    assert_logits(answers[2], plain_logits(pair.theirs, text)[-1:])  # its batch-mate is none the worse
    assert_logits(ask(runner, Statement(1, text, 1, start=20))[1], plain_logits(pair.theirs, text)[-1:])


def test_a_full_pool_lacks_room_until_a_release(pair: Pair) -> None:
    runner, text = full_runner(pair, 100), random_tokens(30, seed=4)
    ask(runner, Statement(1, text), max_length=60)
    assert isinstance(runner.kv, FullKV)
    assert not runner.kv.can_open(spec(60), 60)
    assert runner.kv.can_open(spec(60), 40)
    assert ask(runner, Statement(2, text), max_length=60) == {2: Lack()}
    runner.release([1, 1, 99])
    assert runner.kv.can_open(spec(60), 60)
    assert_logits(ask(runner, Statement(2, text), max_length=60)[2], plain_logits(pair.theirs, text)[-1:])
    assert runner.kv.allocator.num_free == 40


@pytest.mark.parametrize("seed", range(3))
def test_sequences_that_grow_give_the_logits_of_the_text(pair: Pair, seed: int) -> None:
    """Three sequences grow by turns in a pool that is too small for their greatest lengths together."""
    rng, runner = random.Random(seed), full_runner(pair, 2500)
    kv = runner.kv
    assert isinstance(kv, FullKV)
    texts = {i: random_tokens(rng.randint(5, 60), seed=i) for i in (1, 2, 3)}
    for i, text in texts.items():
        assert kv.open(i, spec(2000), len(text) + 3) is not None
    for turn in range(30):
        i = rng.choice([1, 2, 3])
        texts[i] += random_tokens(rng.choice([1, 9, 40]), seed=100 * seed + turn)
        assert kv.grow(i, len(texts[i]))
        assert len(texts[i]) <= kv.room(kv.held[i]) <= 2000
        assert len(kv.held[i].ranges) <= MOST_RANGES
        assert_logits(ask(runner, Statement(i, texts[i], 1))[i], plain_logits(pair.theirs, texts[i])[-1:])
    owned = sum(size_of(held.ranges) for held in kv.held.values())
    assert kv.allocator.num_free == 2500 - owned
    runner.release([1, 2, 3])
    assert kv.allocator.free_ranges == [(0, 2500)]


def lone_kv(pair: Pair, pool_tokens: int) -> FullKV:
    kv = full_runner(pair, pool_tokens).kv
    assert isinstance(kv, FullKV)
    return kv


def test_a_sequence_grows_by_twice_as_much_each_time_and_in_place_where_it_can(pair: Pair) -> None:
    kv = lone_kv(pair, 10_000)
    kv.open(1, spec(3000), 100)
    for tokens, owned in ((100, 100), (101, 356), (356, 356), (357, 868), (900, 1892), (1893, 3000), (3000, 3000)):
        assert kv.grow(1, tokens)
        assert kv.held[1].ranges == [(0, owned)]


def test_neighbours_leave_room_for_growth_while_they_can(pair: Pair) -> None:
    """Two prompts beside each other grow in place; a third that needs the space between them gets it."""
    kv = lone_kv(pair, 3000)
    for i in (1, 2):
        kv.open(i, spec(1000), 100)
    for i in (1, 2):
        assert kv.grow(i, 1000)
        assert len(kv.held[i].ranges) == 1
    assert kv.can_open(spec(1000), 1000)
    kv.release(2)
    kv.open(3, spec(2000), 2000)
    assert kv.allocator.num_free == 0


def test_a_new_range_is_not_small(pair: Pair) -> None:
    """Otherwise a sequence in a nearly full pool would use up the few ranges that it may have."""
    kv = lone_kv(pair, 1000)
    kv.open(1, spec(900), 100)
    wall = kv.allocator.extend((99, 100), 860, 860)  # somebody else's, directly behind
    assert wall == (99, 960)
    assert not kv.grow(1, 101), "40 slots are free"
    kv.allocator.free([(700, 800)])
    assert kv.grow(1, 101)
    assert kv.held[1].ranges == [(0, 100), (700, 764)], "less than it would take if it could"


def test_growth_fails_without_room_and_changes_nothing_then(pair: Pair) -> None:
    kv = lone_kv(pair, 1000)
    kv.open(1, spec(900), 100)
    kv.open(2, spec(900), 700)
    before = kv.allocator.free_ranges.copy(), kv.held[1].ranges.copy()
    assert not kv.grow(1, 301)
    assert (kv.allocator.free_ranges, kv.held[1].ranges) == before
    assert kv.grow(1, 300), "all that is left, though less than it would take if it could"
    assert kv.allocator.num_free == 0


def test_a_sequence_has_few_ranges(pair: Pair) -> None:
    """Somebody else's slots stand behind each of its ranges: it grows three times into new ranges, and then not at
    all, though slots are free elsewhere.
    """
    kv = lone_kv(pair, 40_000)
    kv.open(1, spec(30_000), 100)
    for ranges in range(1, MOST_RANGES + 1):
        assert len(kv.held[1].ranges) == ranges
        assert kv.hemmed_in(1) == (ranges == MOST_RANGES)
        stop = kv.held[1].ranges[-1][1]
        assert kv.allocator.extend((stop - 1, stop), 10, 10) is not None
        assert kv.grow(1, kv.room(kv.held[1]) + 1) == (ranges < MOST_RANGES)
    assert kv.room(kv.held[1]) == 100 + FIRST_GROWTH * (1 + 2 + 4)
    assert kv.allocator.num_free > 30_000


def test_a_sequence_opens_in_few_ranges(pair: Pair) -> None:
    kv = lone_kv(pair, 1000)
    fragment(kv, 100, 500)
    assert not kv.can_open(spec(500), 401)
    assert kv.open(1, spec(500), 401) is None
    assert kv.can_open(spec(500), 400)
    assert kv.open(1, spec(500), 400) is not None
    assert len(kv.held[1].ranges) == MOST_RANGES
