"""Prompt lookup and a model in one leaf: whoever drafts, plain decoding's tokens."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.conftest import HeldOut
from triforce_core.building.assembly import local_engine
from triforce_core.config import Settings
from triforce_core.engine.engine import run_to_end
from triforce_core.engine.sequence import Request
from triforce_core.messages import Drafting, Origin, SamplingParams, Tally
from triforce_core.models.load import load_model

SETTINGS = Settings.model_validate(
    {
        "dtype": "float32",
        "retrieval": {"budget": 256, "refresh_every": 16},
        "target": {"kv_pool_tokens": 8192},
        "max_sequences": 8,
    }
)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.ci), 1.0])
def test_whoever_drafts_the_tokens_are_the_same(held_out: HeldOut, temperature: float) -> None:
    target, drafter = (load_model("demo", role, "float32", "cpu") for role in ("target", "drafter"))
    engine = local_engine(target, drafter, SETTINGS)
    prompt = held_out("turtle.py", 300)
    repeating = prompt + prompt[:100]  # the end repeats the beginning
    kinds = [(lookaheads, drafting) for lookaheads in ((8, 3), (0, 3)) for drafting in Drafting]

    def request(lookaheads: tuple[int, int], drafting: Drafting) -> Request:
        return Request(repeating, 60, SamplingParams(temperature), 5, lookaheads, drafting=drafting)

    [*plain] = run_to_end(engine, [request((0, 0), Drafting.MODEL)])
    tokens: dict[int, list[int]] = defaultdict(list)
    origins: dict[int, bytes] = defaultdict(bytes)
    leaves: dict[int, Tally] = {}
    above: dict[int, Tally] = {}
    for output in run_to_end(engine, [request(*kind) for kind in kinds]):
        tokens[output.sequence_id] += output.tokens
        origins[output.sequence_id] += output.origins
        target_level, retrieval, leaves[output.sequence_id] = output.stats.tallies
        above[output.sequence_id] = retrieval if retrieval.rounds else target_level
    assert [*tokens.values()] == [[token for output in plain for token in output.tokens]] * len(kinds)

    for (lookaheads, drafting), found, leaf, judge in zip(
        kinds, origins.values(), leaves.values(), above.values(), strict=True
    ):
        note = f"{lookaheads} {drafting.name}"
        assert (Origin.LOOKUP in found) == (drafting is not Drafting.MODEL), note
        assert (Origin.DRAFT in found) == (drafting is not Drafting.LOOKUP), note
        assert (leaf.passes > 0) == (leaf.busy_s > 0) == (drafting is not Drafting.LOOKUP), note
        assert leaf.rounds > 3, f"{note}: lookup is scored whoever drafts"
        assert (judge.lookup_accepted > 0) == (drafting is not Drafting.MODEL), note
        assert judge.lookup_accepted <= judge.accepted, note
        assert (judge.lookup_accepted == judge.accepted) == (drafting is Drafting.LOOKUP), note
    if not temperature:
        scored = sum(leaves.values(), Tally())
        assert scored.accepted > scored.rejected, "a text that repeats itself"
