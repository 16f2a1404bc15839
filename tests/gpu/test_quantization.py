"""Quantised self-drafters on a GPU, int4 among them, whose kernel is nowhere else."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import HeldOut
from tests.exactness.cases import finish
from triforce_core.building.inspection import runners_of
from triforce_core.building.loading import load_local_engine
from triforce_core.config import Settings
from triforce_core.engine.sequence import Request
from triforce_core.messages import GREEDY, Tier
from triforce_core.models.quantize import weight_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_a_quantised_self_drafter_is_smaller_and_mostly_right(kind: str, held_out: HeldOut) -> None:
    settings = Settings.model_validate(
        {"device": "cuda", "dtype": "bfloat16", "retrieval": {"quantization": kind}, "target": {"kv_pool_tokens": 4096}}
    )
    engine = load_local_engine(settings)
    models = {tier: runner.model for tier, runner in runners_of(engine).items()}
    assert weight_bytes(models[Tier.RETRIEVAL]) < 0.8 * weight_bytes(models[Tier.TARGET])
    outcome = finish(engine, [Request(held_out("turtle.py", 1500), 100, GREEDY, 0, (8, 3))])
    [acceptance] = outcome.acceptances(Tier.TARGET)
    assert acceptance > (0.3 if kind == "int4" else 0.5)


@pytest.mark.parametrize("kind", ["int8"])
def test_the_target_s_passes_are_untouched(kind: str, held_out: HeldOut) -> None:
    request = Request(held_out("turtle.py", 1500), 100, GREEDY, 0, (0, 0))

    def plain(quantization: str | None) -> list[tuple[int, ...]]:
        settings = {"device": "cuda", "dtype": "float32", "retrieval": {"quantization": quantization}}
        return finish(load_local_engine(Settings.model_validate(settings)), [request]).tokens

    assert plain(kind) == plain(None)
