"""A quantised self-drafter costs acceptance at most: the target's tokens, and weights of its own, are as they were."""

from __future__ import annotations

import pytest

from tests.conftest import HeldOut
from tests.exactness.cases import Outcome, finish
from triforce_core.building.inspection import runners_of
from triforce_core.building.loading import load_local_engine
from triforce_core.config import Settings
from triforce_core.engine.sequence import Request
from triforce_core.messages import SamplingParams, Tier
from triforce_core.models.files import resolve
from triforce_core.models.quantize import weight_bytes

FILES = ["turtle.py", "inspect.py", "doctest.py"]


def settings_for(quantization: str | None, dtype: str = "float32", model: str | None = None) -> Settings:
    return Settings.model_validate(
        {
            "dtype": dtype,
            "retrieval": {"budget": 256, "refresh_every": 16, "quantization": quantization, "model": model},
            "target": {"kv_pool_tokens": 4096},
        }
    )


def decoded(settings: Settings, held_out: HeldOut, lookaheads: tuple[int, int], temperature: float = 0.0) -> Outcome:
    sampling = SamplingParams(temperature)
    requests = [Request(held_out(file, 500), 50, sampling, seed, lookaheads) for seed, file in enumerate(FILES)]
    return finish(load_local_engine(settings), requests)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_quantisation_changes_no_token(temperature: float, held_out: HeldOut) -> None:
    plain = decoded(settings_for(None), held_out, (0, 0), temperature)
    outcome = decoded(settings_for("int8"), held_out, (8, 3), temperature)
    assert outcome.tokens == plain.tokens
    judged = sum((levels[0] for levels in outcome.tallies[1:]), outcome.tallies[0][0])
    assert judged.acceptance is not None
    assert judged.acceptance > 0.5, "a self-drafter that is quantised rightly nearly always agrees"


def test_the_target_s_own_passes_are_untouched(held_out: HeldOut) -> None:
    """In bfloat16 only passes of the same width are comparable; test_bfloat16.py judges the others."""
    plain, beside = (decoded(settings_for(kind, "bfloat16"), held_out, (0, 0)) for kind in (None, "int8"))
    assert beside.tokens == plain.tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", [None, resolve("demo", "target")])
def test_the_weights_are_really_quantised(dtype: str, model: str | None) -> None:
    whole, int8 = (
        {tier: runner.model for tier, runner in runners_of(load_local_engine(settings_for(kind, dtype, model))).items()}
        for kind in (None, "int8")
    )
    assert (whole[Tier.RETRIEVAL] is whole[Tier.TARGET]) == (model is None)
    assert int8[Tier.RETRIEVAL] is not int8[Tier.TARGET]
    before, after, target = map(weight_bytes, (whole[Tier.TARGET], int8[Tier.RETRIEVAL], int8[Tier.TARGET]))
    assert target == before == sum(weight.nbytes for weight in whole[Tier.TARGET].parameters())
    linear = [weight for weight in whole[Tier.TARGET].model.layers.parameters() if weight.dim() == 2]
    spared = sum(weight.nbytes - weight.numel() for weight in linear)
    assert 0 < after - (before - spared) < 0.01 * before, "a byte a weight, and scales"
