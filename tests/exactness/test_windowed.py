"""Models with sliding windows, and with learned sinks: whatever else the engine does at the same time, their tokens are
those of plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.exactness.cases import finish, mixed_requests
from tests.random_models import IN_WINDOW, WINDOWED, random_model, random_tokens, with_noise
from triforce_core.building.assembly import local_engine
from triforce_core.config import Settings, load_settings
from triforce_core.engine.limits import target_limits
from triforce_core.engine.sequence import Request
from triforce_core.errors import InvalidValueError
from triforce_core.messages import SamplingParams
from triforce_core.models.load import ATTENTION

LAYERS = {"num_hidden_layers": 4, "layer_types": IN_WINDOW["layer_types"] * 2}


@cache
def models(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = random_model(family, **LAYERS)
    target.set_attn_implementation(ATTENTION)
    return target, with_noise(target, 0.2)


def settings(**given: Any) -> Settings:
    defaults = {
        "target": {"kv_pool_tokens": 600},  # fragmented soon
        "retrieval": {"budget": 64, "refresh_every": 16},
        "draft": {"window": 60},
    }
    sections = {name: values | given.pop(name, {}) for name, values in defaults.items()}
    return load_settings(dtype="float32", max_sequences=3, **sections, **given)


@cache
def plain(family: str, temperature: float) -> list[tuple[int, ...]]:
    """Each request alone."""
    asked = mixed_requests(temperature, longer=45, more=5)
    alone = [Request(each.prompt, each.max_tokens, each.sampling, each.seed, (0, 0)) for each in asked]
    return [finish(local_engine(*models(family), settings()), [each]).tokens[0] for each in alone]


WAYS: dict[str, Callable[[Path], Settings]] = {
    "ordinary passes": lambda _: settings(),
    "passes of constant shape": lambda _: settings(graphs="eager"),
    "blocks": lambda _: settings(exact="on"),
    "small chunks of prompts": lambda _: settings(target={"prefill_chunk": 16}),
    "offload to memory": lambda _: settings(target={"offload": "host", "resident_layers": 1}),
    "offload to disk": lambda path: settings(target={"offload": "disk", "offload_path": str(path)}),
    "selector h2o": lambda _: settings(retrieval={"selector": "h2o"}),
    "selector mean_key": lambda _: settings(retrieval={"selector": "mean_key"}),
    "a budget less than the window": lambda _: settings(retrieval={"budget": 16}),
    "chunks of one token": lambda _: settings(retrieval={"chunk": 1}),
    "drafts of a heavy-hitter cache": lambda _: settings(draft={"window": 60, "cache": "heavy_hitter"}),
}
QUICK = [("gpt_oss", "passes of constant shape"), ("gemma3", "ordinary passes"), ("olmo3", "selector h2o")]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=[] if (family, way) in QUICK else pytest.mark.slow)
        for family in WINDOWED
        for way in WAYS
        if (family, way) != ("gpt_oss", "blocks")  # in float32, the product for experts depends on the number of rows
    ],
)
def test_tokens_are_those_of_plain_decoding(family: str, way: str, temperature: float, tmp_path: Path) -> None:
    """More requests than there is room for, of all lengths and lookaheads, from a pool that preempts."""
    outcome = finish(local_engine(*models(family), WAYS[way](tmp_path)), mixed_requests(temperature, longer=45, more=5))
    assert outcome.tokens == plain(family, temperature)
    assert sum(tallies[0].accepted for tallies in outcome.tallies) > 0


@pytest.mark.parametrize("selector", ["snapkv", "mean_key", "streaming"])
@pytest.mark.parametrize("family", WINDOWED)
def test_a_retrieval_tier_that_sees_all_agrees_with_the_target(family: str, selector: str) -> None:
    """Its budget holds the text, but layers with a window see the window's chunks alone, as in the target."""
    target, _ = models(family)
    requests = [Request(random_tokens(300, seed=1), 60, SamplingParams(), 1, (6, 0))]
    held = settings(target={"kv_pool_tokens": 600}, retrieval={"budget": 512, "selector": selector, "chunk": 1})
    tally = finish(local_engine(target, target, held), requests).tallies[0][0]
    assert tally.acceptance is not None
    assert tally.acceptance > 0.9


def test_eviction_is_not_combined_with_windows() -> None:
    config = random_model("gemma3").config
    with pytest.raises(InvalidValueError, match=r"target\.eviction: 'streaming' must be none: the model has sliding"):
        target_limits(config, load_settings(target={"eviction": "streaming", "kv_budget": 256}))
