"""The full cache against plain passes of transformers: whatever was said before, the logits are those of the text."""

from __future__ import annotations

import random

import pytest
from torch import Tensor

from tests.random_models import Pair, plain_logits, random_pair, random_tokens
from tests.stating import Statement, ask, assert_logits, fragment, full_runner, spec
from triforce_core.attention import KERNELS, ON_CUDA
from triforce_core.kv.base import Forward, Lack
from triforce_core.messages import Span


@pytest.fixture(scope="module", params=[1, 2, 4], ids="kv_heads={}".format)
def pair(request: pytest.FixtureRequest) -> Pair:
    return random_pair(num_key_value_heads=request.param)


@pytest.mark.parametrize("kernel", [name for name in KERNELS if name not in ON_CUDA])
@pytest.mark.parametrize("hole", [None, 1, 7], ids="hole={}".format)
def test_any_history_gives_the_logits_of_the_text(pair: Pair, kernel: str, hole: int | None) -> None:
    """Three sequences grow, are rolled back, restated and cut short at random, several a pass, in a pool in pieces."""
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
    """The align rule, seen by what is laid out: the longest common prefix is kept."""
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
    assert not runner.kv.can_open(spec(60))
    assert ask(runner, Statement(2, text), max_length=60) == {2: Lack()}
    runner.release([1, 1, 99])
    assert runner.kv.can_open(spec(60))
    assert_logits(ask(runner, Statement(2, text), max_length=60)[2], plain_logits(pair.theirs, text)[-1:])
    assert runner.kv.allocator.num_free == 40
