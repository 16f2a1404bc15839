"""A self-drafter with 8-bit weights on a GPU, whose kernel is nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.conftest import HeldOut
from tests.exactness.cases import finish
from triforce_core.building.inspection import runners_of
from triforce_core.building.loading import load_local_engine
from triforce_core.config import Settings
from triforce_core.engine.sequence import Request
from triforce_core.messages import GREEDY, Tier
from triforce_core.models.int8_product import int8_product
from triforce_core.models.quantize import rounded, weight_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_quantised_self_drafter_is_smaller_and_mostly_right(held_out: HeldOut) -> None:
    given = {"retrieval": {"quantization": "int8"}, "target": {"kv_pool_tokens": 4096}}
    settings = Settings.model_validate({"device": "cuda", "dtype": "bfloat16", **given})
    engine = load_local_engine(settings)
    models = {tier: runner.model for tier, runner in runners_of(engine).items()}
    assert weight_bytes(models[Tier.RETRIEVAL]) < 0.8 * weight_bytes(models[Tier.TARGET])
    outcome = finish(engine, [Request(held_out("turtle.py", 1500), 100, GREEDY, 0, (8, 3))])
    [acceptance] = outcome.acceptances(Tier.TARGET)
    assert acceptance > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(12288, 4096), (4096, 11008), (70, 300)], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 9, 64])
def test_the_kernel_against_float64(tokens: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    with torch.device("cuda"):
        layer = rounded(nn.Linear(shape[1], shape[0], bias=False, dtype=dtype))
        hidden = torch.randn(tokens, shape[1], dtype=dtype)
    expected = hidden.double() @ (layer.weight.double() * layer.scale.double()[:, None]).T
    found = int8_product(hidden, layer.weight, layer.scale).double()
    assert (found - expected).norm() < (3e-3 if dtype is torch.bfloat16 else 1e-3) * expected.norm()


def test_the_target_s_passes_are_untouched(held_out: HeldOut) -> None:
    request = Request(held_out("turtle.py", 1500), 100, GREEDY, 0, (0, 0))

    def plain(quantization: str | None) -> list[tuple[int, ...]]:
        settings = {"device": "cuda", "dtype": "float32", "retrieval": {"quantization": quantization}}
        return finish(load_local_engine(Settings.model_validate(settings)), [request]).tokens

    assert plain("int8") == plain(None)
