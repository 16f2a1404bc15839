"""The streaming cache: logits of a plain pass over sinks and window, side by side, whatever was said before."""

from __future__ import annotations

import random

import pytest
from torch import Tensor

from tests.random_models import Pair, plain_logits, random_pair, random_tokens
from tests.stating import Statement, ask, assert_logits, fragment, geometry, spec
from triforce_core.attention import KERNELS
from triforce_core.kv.base import Forward, Lack
from triforce_core.kv.streaming import StreamingHeld, StreamingKV, WindowSettings
from triforce_core.messages import Span
from triforce_core.models.runner import ModelRunner

WINDOWS = [WindowSettings(4, 12, 6), WindowSettings(0, 8, 1), WindowSettings(1, 1, 1), WindowSettings(3, 20, 40)]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return random_pair()


def streaming_runner(pair: Pair, settings: WindowSettings, max_sequences: int = 2) -> ModelRunner:
    return ModelRunner(pair.ours, StreamingKV(geometry(pair), max_sequences, settings, KERNELS["cpu_flash"]))


def window_start(runner: ModelRunner, sequence_id: int = 1) -> int:
    held = runner.kv.held[sequence_id]
    assert isinstance(held, StreamingHeld)
    return held.window_start


def seen(runner: ModelRunner, text: tuple[int, ...], settings: WindowSettings, rolled_back: int) -> tuple[int, ...]:
    """What the cache says that it sees of `text`, checked for what it must and may not see."""
    start = window_start(runner)
    least = settings.window - rolled_back
    assert start == settings.sinks or len(text) - start >= least, "a window is whole but for what was rolled back"
    assert settings.sinks + len(text) - start <= settings.capacity
    return text[: settings.sinks] + text[start:]


@pytest.mark.parametrize("settings", WINDOWS, ids=str)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_decoding_far_beyond_the_window(pair: Pair, settings: WindowSettings, in_pieces: bool) -> None:
    """Token by token: all of the text while it fits, then sinks and window at slot positions, moved when full."""
    runner = streaming_runner(pair, settings)
    if in_pieces:
        fragment(runner.kv, 3, settings.capacity)
    text, starts = random_tokens(1, seed=1), set[int]()
    for token in random_tokens(150, seed=2):
        found = ask(runner, Statement(1, text, 1, start=len(text) - 1))[1]
        assert_logits(found, plain_logits(pair.theirs, seen(runner, text, settings, rolled_back=0))[-1:])
        starts.add(window_start(runner))
        text += (token,)
    assert len(starts) > 1, "the window was meant to move"
    assert len(runner.kv.held[1].ranges) > 1 or not in_pieces or settings.capacity <= 3


@pytest.mark.parametrize("settings", WINDOWS, ids=str)
def test_any_history_gives_the_logits_of_sinks_and_window(pair: Pair, settings: WindowSettings) -> None:
    """Speculation in all its forms: growth, rollback by any amount (into and below the window), long jumps."""
    rng = random.Random(str(settings))
    runner, text, longest = streaming_runner(pair, settings), (), 0
    for _ in range(150):
        kept = max(0, len(text) - rng.choice([0, 0, 1, 3, 10, 40, 1000]))
        longest = max(longest, len(text)) if kept else 0
        text = text[:kept] + random_tokens(rng.choice([1, 1, 2, 4, 30, 100]), seed=rng.randrange(10**6))
        start = rng.choice([0, kept])
        found = ask(runner, Statement(1, text, 1, start=start), max_length=10_000)[1]
        assert_logits(found, plain_logits(pair.theirs, seen(runner, text, settings, max(0, longest - len(text))))[-1:])


def test_a_long_missing_prefix_forwards_sinks_and_window_only(pair: Pair) -> None:
    settings = WindowSettings(4, 12, 6)
    runner, text = streaming_runner(pair, settings), random_tokens(5000, seed=3)
    rows = runner.kv.prepare([Forward(Span(1, 0, text, spec(10_000)), 1)]).rows
    assert rows[0].placed.tokens == [*text[:4], *text[-12:]]
    assert rows[0].placed.positions == range(16)
    assert rows[0].placed.visible == []


def test_two_sequences_do_not_see_one_another(pair: Pair) -> None:
    settings = WindowSettings(2, 10, 4)
    runner = streaming_runner(pair, settings)
    first, second = random_tokens(40, seed=4), random_tokens(25, seed=5)
    for end in range(1, 25):
        answers = ask(runner, Statement(1, first[: 2 * end]), Statement(2, second[:end]))
        for sequence_id, text in [(1, first[: 2 * end]), (2, second[:end])]:
            visible = text[:2] + text[window_start(runner, sequence_id) :]
            assert_logits(answers[sequence_id], plain_logits(pair.theirs, visible)[-1:])


def test_memory_is_bounded_by_the_number_of_sequences(pair: Pair) -> None:
    settings = WindowSettings(4, 12, 6)
    runner = streaming_runner(pair, settings, max_sequences=2)
    assert runner.kv.keys[0].shape[1] == 2 * settings.capacity + 1, "and the dump slot"
    text = random_tokens(300, seed=6)
    answers = ask(runner, *(Statement(i, text) for i in (1, 2, 3)))
    assert answers[3] == Lack(), "no room, and the first two are none the worse"
    assert isinstance(answers[1], Tensor)
    assert_logits(answers[2], answers[1])
    runner.release([1])
    assert_logits(ask(runner, Statement(3, text))[3], answers[1])


def test_what_was_never_stated_is_missing(pair: Pair) -> None:
    runner, text = streaming_runner(pair, WINDOWS[0]), random_tokens(50, seed=7)
    assert ask(runner, Statement(1, text, 1, start=30)) == {1: Lack(missing_from=0)}
    ask(runner, Statement(1, text[:20]))
    assert ask(runner, Statement(1, text, 1, start=30)) == {1: Lack(missing_from=20)}
