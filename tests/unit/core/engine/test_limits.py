"""What can never be served is refused before it is queued, by field, value and rule."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from triforce_core.engine.limits import Limits
from triforce_core.engine.sequence import Request
from triforce_core.errors import ContextLengthError, InvalidValueError
from triforce_core.messages import GREEDY

LIMITS = Limits(context_length=100, kv_pool_tokens=80, vocab_size=50)
GOOD = Request(prompt=(1, 2, 3), max_tokens=10, sampling=GREEDY, seed=0, lookaheads=(8, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ()}, "prompt: '' must hold at least one token"),
        ({"prompt": (1, 50, 2)}, "prompt: 50 is not a token id: must be at least 0 and below 50"),
        ({"prompt": (1, -1)}, "prompt: -1 is not a token id"),
        ({"max_tokens": 0}, "max_tokens: 0 must be at least 1"),
        ({"seed": -(2**63) - 1}, f"seed: {-(2**63) - 1} must be at least -2**63 and below"),
        ({"seed": 2**63}, f"seed: {2**63} must be at least -2**63 and below"),
        ({"resume": (1,) * 11}, "resume_token_ids: 11 must be at most max_tokens"),
        ({"resume": (99,)}, "resume_token_ids: 99 is not a token id"),
        ({"priority": -101}, "priority: -101 must be at least -100 and at most 100"),
        ({"priority": 101}, "priority: 101 must be at least -100 and at most 100"),
        ({"timeout_s": 0.0}, "timeout_s: 0.0 must be above 0"),
        ({"timeout_s": -1e-9}, "timeout_s: -1e-09 must be above 0"),
        ({"timeout_s": math.nan}, "timeout_s: nan must be above 0"),
    ],
)
def test_a_bad_request(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError) as refusal:
        LIMITS.check(replace(GOOD, **changes))
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "limits", "named"),
    [
        (91, 10, LIMITS, ["91 prompt + 10 output tokens", "context of 100"]),
        (71, 10, LIMITS, ["71 prompt + 10 output tokens", "KV pool of 80"]),
        (1, 100, replace(LIMITS, kv_pool_tokens=1000), ["1 prompt + 100 output tokens", "context of 100"]),
    ],
)
def test_what_is_too_large(prompt: int, max_tokens: int, limits: Limits, named: list[str]) -> None:
    with pytest.raises(ContextLengthError) as refusal:
        limits.check(replace(GOOD, prompt=(1,) * prompt, max_tokens=max_tokens))
    for part in named:
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"prompt": (49,) * 70}, {"seed": 2**63 - 1}, {"seed": -1}, {"seed": -(2**63)}, {"resume": (0,) * 9}),
        *({"priority": -100}, {"priority": 100}, {"timeout_s": 1e-9}, {"timeout_s": math.inf}),
    ],
    ids=str,
)
def test_what_fits_passes(changes: dict[str, Any]) -> None:
    LIMITS.check(replace(GOOD, **changes))


def test_the_tokens_of_what_is_too_long_are_not_looked_at() -> None:
    with pytest.raises(ContextLengthError, match="1000000 prompt"):
        LIMITS.check(replace(GOOD, prompt=(50,) * 1_000_000))


@pytest.mark.parametrize("pool", [80, 100, 1000])
@pytest.mark.parametrize("prompt", [1, 79, 80, 99, 100, 200])
def test_the_longest_output_is_the_most_that_passes(prompt: int, pool: int) -> None:
    limits = replace(LIMITS, kv_pool_tokens=pool)
    longest = limits.longest_output(prompt)
    assert longest >= 1
    request = replace(GOOD, prompt=(1,) * prompt, max_tokens=longest)
    if prompt < min(pool, 100):
        limits.check(request)
        request = replace(request, max_tokens=longest + 1)
    with pytest.raises(ContextLengthError):
        limits.check(request)


def test_an_error_reads_no_more_of_a_value_than_it_shows() -> None:
    class Counted:
        shown = 0

        def __repr__(self) -> str:
            Counted.shown += 1
            return "x"

    for value in ([Counted()] * 10_000, {number: Counted() for number in range(10_000)}, [[Counted()] * 1000] * 1000):
        Counted.shown = 0
        assert len(str(InvalidValueError("stop", value, "is wrong"))) <= 100
        assert Counted.shown <= 1000
    assert str(InvalidValueError("stop", "a" * 10**6, "is wrong")) == f"stop: '{'a' * 76}... is wrong"
    assert str(InvalidValueError("stop", {"b": [1, None], "a": "é"}, "is wrong")).endswith("'b': [1, None]} is wrong")
