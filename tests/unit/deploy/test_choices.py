"""What is chosen for a model where the settings do not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy import choices
from tests.random_models import random_model
from triforce_core.config import Settings, load_settings
from triforce_core.models.files import context_length, load_config

TOKEN = 2 * 2 * 2 * 16 * 4  # bytes of KV of `random_model` in float32: keys and values, layers, heads, dimension


@pytest.fixture
def model(tmp_path: Path) -> str:
    random_model(max_position_embeddings=131_072).save_pretrained(tmp_path / "Tiny-128K")
    return str(tmp_path / "Tiny-128K")


def fitted(monkeypatch: pytest.MonkeyPatch, free_tokens: int, **given: object) -> tuple[Settings, str]:
    """The settings that are chosen where this much memory is free, and the line that says so."""
    monkeypatch.setattr(choices, "free_bytes", lambda place: free_tokens * TOKEN)
    monkeypatch.setattr(choices, "weight_bytes", lambda settings: [0, 0, 0])
    settings = load_settings(None, dtype="float32", **given)
    chosen = choices.fitted(settings)
    return chosen, choices.line(settings, chosen)


@pytest.mark.parametrize("given", [{}, {"window": 20}])
def test_a_drafter_that_is_not_named_is_one_that_fits(given: dict[str, int]) -> None:
    assert load_settings(None, draft=given).draft.model == "demo"
    assert load_settings(None, target={"model": "demo"}, draft=given).draft.model == "demo"
    lookup = load_settings(None, target={"model": "/models/any"}, draft=given).draft
    assert (lookup.model, lookup.window) == ("ngram", given.get("window", 252))
    named = load_settings(None, target={"model": "/models/any"}, draft={**given, "model": "demo"})
    assert named.draft.model == "demo"


def test_with_room_the_context_is_the_models_own(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    chosen, line = fitted(monkeypatch, 10_000_000, target={"model": model})
    assert (chosen.target.context_length, chosen.retrieval.budget, chosen.max_sequences) == (131_072, 4096, 8)
    assert line == (
        "serving Tiny-128K: drafter prompt lookup (draft.model names none), context 131,072 tokens (the model's own),"
        " retrieval budget 4,096 tokens, requests together up to 8"
    )


def test_without_room_the_context_is_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    chosen, line = fitted(monkeypatch, 50_000, target={"model": model})
    assert (chosen.target.context_length, chosen.retrieval.budget, chosen.max_sequences) == (24 * 1024, 1024, 6)
    assert "context 24,576 tokens (of the model's 131,072: free memory holds no more)" in line
    shared, _ = fitted(monkeypatch, 50_000, target={"model": model}, server={"replicas": {"max": 2}})
    assert shared.target.context_length == 12 * 1024


def test_free_memory_does_not_choose_the_frequencies_of_longrope(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those for long texts are taken for contexts beyond the length of the first training: other tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    made = random_model(
        max_position_embeddings=131_072, rope_parameters=rope | {"original_max_position_embeddings": 16_384}
    )
    made.save_pretrained(tmp_path)
    for free_tokens, context in ((10_000_000, 131_072), (50_000, 24 * 1024), (10_000, 17 * 1024)):
        chosen, _ = fitted(monkeypatch, free_tokens, target={"model": str(tmp_path)})
        assert chosen.target.context_length == context
    chosen, _ = fitted(monkeypatch, 10_000, target={"model": str(tmp_path), "context_length": 4096})
    assert chosen.target.context_length == 4096, "who sets it chooses"


def test_weights_are_not_free(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    settings = load_settings(None, dtype="float32", target={"model": model})
    monkeypatch.setattr(choices, "free_bytes", lambda place: 1 << 30)
    weights = sum(weight.numel() for weight in random_model(max_position_embeddings=131_072).parameters()) * 4
    assert choices.memory_left(settings) == (1 << 30) - 2 * weights  # the target's and the retrieval tier's process
    together = load_settings(None, dtype="float32", target={"model": model}, placement={"colocate": "all"})
    assert choices.memory_left(together) == (1 << 30) - weights


def test_what_is_set_is_kept(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    target = {"model": model, "context_length": 100_000}
    given = {"target": target, "retrieval": {"budget": 512}, "max_sequences": 7, "draft": {"model": "demo"}}
    chosen, line = fitted(monkeypatch, 5_000, **given)
    assert (chosen.target.context_length, chosen.retrieval.budget, chosen.max_sequences) == (100_000, 512, 7)
    assert "drafter the demo pair's, context 100,000 tokens (as set)" in line


def test_kv_that_lies_elsewhere_does_not_lower_the_context(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    for target in ({"offload": "host"}, {"eviction": "streaming"}):
        chosen, _ = fitted(monkeypatch, 5_000, target={"model": model, **target})
        assert chosen.target.context_length == 131_072


def test_the_demo_pair_is_served_as_its_defaults_say(monkeypatch: pytest.MonkeyPatch) -> None:
    own = context_length(load_config("demo", "target"))
    settings = load_settings(None, dtype="float32")
    monkeypatch.setattr(choices, "free_bytes", lambda place: 64 << 30)
    chosen = choices.fitted(settings)
    assert chosen == settings.model_copy(update={"target": chosen.target})
    assert chosen.target.context_length == own
