"""Prompt lookup drafts for the demo target: plain decoding's tokens, and drafts among them."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel

from tests.conftest import HeldOut
from tests.exactness.cases import finish
from triforce_core.building.assembly import local_engine
from triforce_core.building.inspection import held_of
from triforce_core.building.loading import load_local_engine
from triforce_core.config import Settings
from triforce_core.engine.sequence import Request
from triforce_core.messages import SamplingParams, Tier
from triforce_core.models.load import load_model

SETTINGS = Settings.model_validate(
    {
        "dtype": "float32",
        "draft": {"model": "ngram"},
        "retrieval": {"budget": 256, "refresh_every": 16},
        "target": {"kv_pool_tokens": 4096},
    }
)
LOOKAHEADS = [(8, 3), (0, 5), (4, 8), (1, 1)]  # of four requests; the second asks the draft tier and no retrieval


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return load_model("demo", "target", "float32", "cpu")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompt_lookup_changes_no_token(target: PreTrainedModel, held_out: HeldOut, temperature: float) -> None:
    engine = local_engine(target, None, SETTINGS)
    sampling = SamplingParams(temperature)

    def requests(lookaheads: list[tuple[int, int]]) -> list[Request]:
        return [Request(held_out("turtle.py", 600), 60, sampling, seed, each) for seed, each in enumerate(lookaheads)]

    plain = [finish(engine, [request]).tokens[0] for request in requests([(0, 0)] * 4)]
    outcome = finish(engine, requests(LOOKAHEADS))
    assert outcome.tokens == plain
    judges = [levels[1 if lookaheads[0] else 0] for lookaheads, levels in zip(LOOKAHEADS, outcome.tallies, strict=True)]
    assert all(tally.proposed > 0 for tally in judges)
    assert sum(tally.accepted for tally in judges) > (0 if temperature else 20)
    assert not held_of(engine)[Tier.DRAFT]


def test_it_comes_by_the_settings_and_loads_no_drafter(held_out: HeldOut) -> None:
    engine = load_local_engine(SETTINGS)
    assert set(held_of(engine)) == set(Tier)
    outcome = finish(engine, [Request(held_out("turtle.py", 600), 30, SamplingParams(0.0), 0, (8, 3))])
    assert outcome.tallies[0][1].proposed > 0
