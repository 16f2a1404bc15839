"""Passes of constant shape, which a GPU captures, give the same proposals and the same tokens as ordinary passes.

Not only tokens are compared, but also what each tier proposed for each request, and what became of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.conftest import HeldOut
from tests.exactness.cases import (
    CASES,
    COVERING,
    DEMO,
    Case,
    Outcome,
    finish,
    mixed_requests,
    random_prompts,
    speculate,
)
from tests.random_models import random_pair, with_noise
from triforce_core.building.assembly import local_engine
from triforce_core.config import Settings
from triforce_core.kv.base import Batch, KVCache
from triforce_core.kv.full import FullKV
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.streaming import StreamingKV
from triforce_core.models.graphs import ShapedPasses

# Batches of five, greedy and not, snapshots that are refreshed and tails that are full, windows that move.
QUICK = [case for case in COVERING if case.batch == 5 and case.budget < 1024 and case.window == 60][:2]
QUICK.append(replace(DEMO[1], window=60))
SLOW = [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in CASES if case not in QUICK]

TIERS: dict[type[KVCache], str] = {FullKV: "target", RetrievalKV: "retrieval", StreamingKV: "draft"}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many passes of each tier had a shape, and how many had none that fits."""
    counted: Counter[str] = Counter()
    forward = ShapedPasses.forward

    def counting(shaped: ShapedPasses, batch: Batch) -> torch.Tensor | None:
        logits = forward(shaped, batch)
        [tier] = (name for kind, name in TIERS.items() if isinstance(batch.cache, kind))
        counted[f"{tier}: {'ordinary' if logits is None else 'shaped'}"] += 1
        return logits

    monkeypatch.setattr(ShapedPasses, "forward", counting)
    return counted


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found.tokens == expected.tokens
    assert found.tallies == expected.tallies
    assert found.events == expected.events


@pytest.mark.parametrize("case", [*QUICK[:2], pytest.param(QUICK[2], marks=pytest.mark.ci), *SLOW], ids=str)
def test_all_that_is_proposed_is_the_same(case: Case, passes: Counter[str], held_out: HeldOut) -> None:
    text = held_out("turtle.py", 3 * case.budget + 100) if case.model == "demo" else random_prompts(case)
    found = speculate(case, 40, text, graphs="eager")
    enough = 20 if case in QUICK else 0  # where much is accepted passes are few, at lookaheads of 16 most are too long
    for tier in TIERS.values():
        assert passes[f"{tier}: shaped"] > enough
    passes.clear()
    assert_same(found, speculate(case, 40, text))
    assert not passes, "off is off"


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.ci), 1.0])
def test_sequences_that_come_and_go(temperature: float, passes: Counter[str]) -> None:
    """There are more requests than there is room for, of all lengths and lookaheads. The models have grouped query
    heads.
    """
    target, _ = random_pair(num_attention_heads=8, num_key_value_heads=2)
    drafter = with_noise(target, 0.2)
    requests = mixed_requests(temperature, longer=45, more=5)

    def run(graphs: str) -> Outcome:
        settings = Settings.model_validate(
            {
                "dtype": "float32",
                "max_sequences": 3,
                "graphs": graphs,
                "target": {"kv_pool_tokens": 600},  # fragmented soon
                "retrieval": {"budget": 32, "refresh_every": 16},
                "draft": {"window": 20},
                "speculation": {"nodes": 0},  # no shapes with room for trees, so that some passes are too long
            }
        )
        return finish(local_engine(target, drafter, settings), requests)

    found = run("eager")
    for tier in TIERS.values():
        assert passes[f"{tier}: shaped"] > 20
        assert passes[f"{tier}: ordinary"] > 2, "some passes are too long for any shape"
    assert_same(found, run("off"))
