"""The heavy-hitter cache at the draft tier: what it forgets costs acceptance, and never a token."""

from __future__ import annotations

import pytest

from tests.conftest import HeldOut
from tests.exactness.cases import finish, mixed_requests
from tests.random_models import random_model, with_noise
from triforce_core.building.assembly import local_engine
from triforce_core.building.draft_model import draft_proposer
from triforce_core.building.inspection import runners_of
from triforce_core.config import MAX_LOOKAHEAD, Settings
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request
from triforce_core.kv.base import Held, Lack, Placement
from triforce_core.kv.heavy_hitter import HeavyHeld, HeavyHitterKV
from triforce_core.messages import SamplingParams, Tier
from triforce_core.models.load import ATTENTION, load_model

SETTINGS = Settings.model_validate(
    {
        "dtype": "float32",
        "retrieval": {"budget": 256, "refresh_every": 16},
        "target": {"kv_pool_tokens": 16_384, "prefill_chunk": 300},
        "draft": {"cache": "heavy_hitter", "window": 60},
        "max_sequences": 5,
    }
)


def evictions_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A list that grows with each eviction at the draft tier. It notes the sequence and its new start, which is 0 if
    the cache began anew.
    """
    kv = runners_of(engine)[Tier.DRAFT].kv
    assert isinstance(kv, HeavyHitterKV)
    place, found = kv.place, list[tuple[int, int]]()

    def noting(sequence_id: int, held: Held, keep: int, end: int, num_sampled: int) -> Placement | Lack:
        assert isinstance(held, HeavyHeld)
        before = held.start
        placed = place(sequence_id, held, keep, end, num_sampled)
        if held.start != before:
            found.append((sequence_id, held.start))
        return placed

    monkeypatch.setattr(kv, "place", noting)
    return found


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_the_demo_pair(held_out: HeldOut, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = (load_model("demo", role, "float32", "cpu") for role in ("target", "drafter"))
    engine, prompt = local_engine(target, drafter, SETTINGS), held_out("turtle.py", 1000)

    def requests(lookaheads: tuple[int, int] | None = None) -> list[Request]:
        asked = [(8, 3), (0, 3), (16, 6)]
        return [
            Request(prompt[: 1000 - 270 * i], 90, SamplingParams(temperature), i, lookaheads or each)
            for i, each in enumerate(asked)
        ]

    plain = [finish(engine, [request]).tokens[0] for request in requests((0, 0))]
    evictions = evictions_of(engine, monkeypatch)
    outcome = finish(engine, requests())
    assert outcome.tokens == plain
    assert len({sequence_id for sequence_id, _ in evictions}) == 3
    for sequence_id in {sequence_id for sequence_id, _ in evictions}:
        starts = [start for each, start in evictions if each == sequence_id]
        assert len(starts) > (1090 - 2 * 270) // 32 - 4
        assert starts == sorted(starts), "no text was taken back below an eviction, or all would be forwarded again"
    judged = [*outcome.acceptances(Tier.RETRIEVAL), *outcome.acceptances(Tier.TARGET)]
    assert max(judged) > 0.5


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.ci), 0.8])
def test_drafters_of_any_quality_in_batches_that_change(temperature: float) -> None:
    """Drafts are taken back, also whole blocks of them. Texts beyond the drafter's positions are decoded, too."""
    for noise, positions in ((0.1, 8192), (0.4, 120)):
        target = random_model()
        target.set_attn_implementation(ATTENTION)
        drafter = with_noise(target, noise, seed=1)
        drafter.config.max_position_embeddings = positions
        asked = mixed_requests(temperature, 40, 60)[:6]
        engine = local_engine(target, drafter, SETTINGS)
        plain = [
            finish(engine, [Request(each.prompt, each.max_tokens, each.sampling, each.seed, (0, 0))]).tokens[0]
            for each in asked
        ]
        assert finish(engine, asked).tokens == plain


def test_longer_texts_than_the_drafter_has_positions_are_not_drafted() -> None:
    drafter = random_model(max_position_embeddings=64)
    drafter.set_attn_implementation(ATTENTION)
    target = random_model()
    target.set_attn_implementation(ATTENTION)
    engine = local_engine(target, drafter, SETTINGS)
    short, long = (Request(tuple(range(n)), 30, SamplingParams(0.8), 0, (0, 3)) for n in (20, 100))
    assert finish(engine, [short]).tallies[0][0].proposed > 20
    assert finish(engine, [long]).tallies[0][0].proposed == 0


def test_its_memory_is_checked() -> None:
    """The cache holds as many tokens as sinks and window together, and has room for a block and its drafts."""
    runner = draft_proposer(random_model(), SETTINGS).runner
    assert runner is not None
    assert isinstance(runner.kv, HeavyHitterKV)
    sizes = runner.kv.settings
    assert (sizes.budget, sizes.heavy, sizes.slack, sizes.lag + sizes.most_drafts) == (
        64,
        32,
        32,
        3 * MAX_LOOKAHEAD + 2,
    )
