"""`deterministic: true` in bfloat16: a request's tokens do not depend on who else asks, nor on when."""

from __future__ import annotations

import pytest

from tests.conftest import HeldOut
from triforce_core.building.loading import load_local_engine
from triforce_core.config import Settings, load_settings
from triforce_core.engine.engine import run_to_end
from triforce_core.engine.sequence import Request
from triforce_core.errors import InvalidValueError
from triforce_core.messages import SamplingParams

SETTINGS: Settings = load_settings(deterministic=True, dtype="bfloat16", target={"prefill_chunk": 256})


def requests(held_out: HeldOut) -> list[Request]:
    return [
        Request(held_out(name, 700), 60, SamplingParams(1.0), seed, (8, 3))
        for seed, name in enumerate(("inspect.py", "turtle.py", "tarfile.py"))
    ]


def test_the_tokens_of_a_request_are_the_same_beside_any_others(held_out: HeldOut) -> None:
    engine = load_local_engine(SETTINGS, drafting=True)
    asked = requests(held_out)

    def tokens_of(requests: list[Request]) -> list[tuple[int, ...]]:
        got: dict[int, tuple[int, ...]] = {}
        for output in run_to_end(engine, requests):
            got[output.sequence_id] = got.get(output.sequence_id, ()) + output.tokens
            assert len(engine.scheduler.live) <= 1
        return [got[i] for i in sorted(got)]

    alone = [tokens_of([request])[0] for request in asked]
    assert tokens_of(asked) == alone
    assert tokens_of(asked[::-1]) == alone[::-1]


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"max_sequences": 2}, "max_sequences 2 must be 1 where deterministic is true"),
        ({"placement": {"colocate": "none"}}, "colocate none must be all where deterministic is true"),
        ({"target": {"max_stall_ms": 50}}, "max_stall_ms 50 must be off where deterministic is true"),
    ],
    ids=str,
)
def test_settings_that_contradict_it_are_refused(given: dict[str, object], rule: str) -> None:
    with pytest.raises(InvalidValueError, match=rule):
        load_settings(deterministic=True, **given)


def test_it_settles_what_passes_are_like() -> None:
    assert (SETTINGS.max_sequences, SETTINGS.placement.colocate) == (1, "all")
    assert SETTINGS.target.max_stall_ms is None
    assert not SETTINGS.chooses_threads
    assert SETTINGS.micro_batches == 1
