"""`triforce bench stalls`: what it makes of a run. Arrivals and stages are written by hand, and no actor is started."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, cast

import pytest

from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import load_settings
from triforce_core.errors import InvalidValueError
from triforce_core.messages import Tier
from triforce_tools.tiers.arrangement import Arrangement, Decoded
from triforce_tools.tiers.stalls import Stalls, StallWorkload, figures, roomy, run
from triforce_tools.tiers.timeline import Stage


def decoded(*moments: float, prompt_tokens: int = 0) -> Decoded:
    """A request that got one token at each of these seconds."""
    return Decoded(prompt_tokens, [*range(len(moments))], [(moment, 1) for moment in moments])


def test_only_waits_that_last_beyond_the_arrival_count() -> None:
    stalls = Stalls(decoded(0, 5, 6, 9, 11), arrived=7)
    assert stalls.longest_gap_ms == 3000, "from 6 to 9, since the arrival is within it; the wait of 5 s was before"


def test_the_first_text_is_that_of_the_short_prompt() -> None:
    stalls = Stalls(decoded(0, 30), arrived=7, others=[decoded(8), decoded(20), decoded(8.5, 25)])
    assert stalls.first_text_ms == 1500


def test_tokens_are_counted_from_the_stream_s_first_text_to_the_end_of_all() -> None:
    """By hand: 3 tokens of the stream, 1 + 2 of the others, and their prompts of 100 + 20, in 10 s."""
    others = [decoded(8, prompt_tokens=100), decoded(8, 12, prompt_tokens=20)]
    stalls = Stalls(decoded(2, 6, 10, prompt_tokens=1024), arrived=7, others=others)
    assert stalls.tokens_per_s == 12.6


def test_figures_are_medians_of_the_runs() -> None:
    alone = [Stalls(decoded(0, 1, 1 + gap), arrived=1) for gap in (1, 2, 9)]
    runs = [
        Stalls(decoded(0, 1, 1 + gap), arrived=1, others=[decoded(1 + first)], turns=turns)
        for gap, first, turns in ((5, 3, 7), (6, 1, 3), (30, 2, 4))
    ]
    found = figures(alone, runs)
    assert found.pop("tokens_per_s") == pytest.approx(4 / 7)
    assert found == {
        "longest_gap_ms": 6000,
        "longest_gap_alone_ms": 2000,
        "short_prompt_first_text_ms": 2000,
        "short_prompt_turns": 4,
    }


class Scripted:
    """An arrangement that gives a run and its stages, instead of running anything."""

    def __init__(self, stalls: Stalls, stages: list[Stage]) -> None:
        self.stalls, self.batches = stalls, [stages, [stage(Tier.TARGET, 8)]]  # the last are of an earlier run

    def take_stages(self) -> list[Stage]:
        return self.batches.pop()

    def wait(self, coroutine: Coroutine[Any, Any, Stalls]) -> Stalls:
        coroutine.close()
        return self.stalls


def stage(tier: Tier, stop: float) -> Stage:
    return Stage(tier, stop - 1, stop, 1.0, 1, 1)


def scripted(stalls: Stalls, *stages: Stage) -> Stalls:
    return run(cast(Arrangement, Scripted(stalls, [*stages])), [pb.DecodeRequest()])


def test_turns_are_the_target_s_passes_from_the_arrival_to_the_short_prompt_s_first_text() -> None:
    stalls = Stalls(decoded(0, 30), arrived=7, others=[decoded(20), decoded(20), decoded(10)])
    target = [stage(Tier.TARGET, stop) for stop in (6, 7.5, 9, 10, 11)]
    below = [stage(Tier.RETRIEVAL, 8), stage(Tier.DRAFT, 8)]
    assert scripted(stalls, *target, *below).turns == 3, "those that end at 7.5, 9 and 10"
    assert scripted(Stalls(decoded(0, 30), arrived=7), *target).turns == 0, "a stream alone waits for no prompt"


def test_a_stream_that_ends_before_all_prompts_have_text_is_refused() -> None:
    others = [decoded(20), decoded(20), decoded(10)]
    with pytest.raises(InvalidValueError, match="output: 2 is too short"):
        scripted(Stalls(decoded(0, 20), arrived=7, others=others))


def test_all_prompts_fit_at_once() -> None:
    """By hand: 1,024 + 100, twice 1,001 + 16, and 200 + 16 tokens, each in whole chunks of 8."""
    wide = roomy(load_settings(retrieval={"chunk": 8}), StallWorkload(context=1001, output=100))
    assert (wide.max_sequences, wide.target.kv_pool_tokens) == (4, 1128 + 2 * 1024 + 216)
