"""Speculation on fused kernels, compiled for the CPU: exactly the tokens of plain decoding on the same kernels."""

from __future__ import annotations

import pytest

from tests.compiling import needs_a_compiler
from tests.conftest import HeldOut
from tests.exactness.cases import finish, mixed_requests
from tests.random_models import random_pair, with_noise
from triforce_core.building.assembly import local_engine
from triforce_core.building.inspection import runners_of
from triforce_core.building.loading import load_local_engine
from triforce_core.config import Settings
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request
from triforce_core.messages import GREEDY
from triforce_core.models.fuse import is_fused

pytestmark = [pytest.mark.slow, needs_a_compiler]


def settings_with(graphs: str, quantization: str | None = None) -> Settings:
    return Settings.model_validate(
        {
            "dtype": "float32",
            "compile": "on",
            "max_sequences": 3,
            "graphs": graphs,
            "retrieval": {"budget": 64, "refresh_every": 16, "quantization": quantization},
            "draft": {"window": 20},
            "target": {"kv_pool_tokens": 4096},
        }
    )


def assert_exact(engine: Engine, requests: list[Request]) -> None:
    """In batches with all tiers taking part, each request has the tokens that it has alone with the target."""
    for runner in runners_of(engine).values():
        assert is_fused(runner.model)
    plain = [Request(r.prompt, r.max_tokens, r.sampling, r.seed, (0, 0)) for r in requests]
    expected = [finish(engine, [request]).tokens[0] for request in plain]
    found = finish(engine, requests)
    assert found.tokens == expected
    assert sum(levels[0].accepted for levels in found.tallies) > 50, "it did speculate"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("graphs", ["off", "eager"])
def test_of_random_models(graphs: str, temperature: float) -> None:
    """There are more requests than there is room for, of all lengths and lookaheads. The models have grouped query
    heads.
    """
    target, _ = random_pair(num_attention_heads=8, num_key_value_heads=2)
    engine = local_engine(target, with_noise(target, 0.1), settings_with(graphs))
    assert_exact(engine, mixed_requests(temperature, longer=57, more=10))


def test_of_the_demo_pair_with_a_quantised_self_drafter(held_out: HeldOut) -> None:
    files = ["turtle.py", "inspect.py", "doctest.py"]
    requests = [Request(held_out(file, 300), 40, GREEDY, seed, (8, 3)) for seed, file in enumerate(files)]
    assert_exact(load_local_engine(settings_with("eager", "int8")), requests)
