"""`exact: on` on a GPU: the check at start finds that a token's bits do not depend on its pass, with some padding."""

from __future__ import annotations

import pytest
import torch

from tests.random_models import random_model
from triforce_core.building.exactness import make_exact
from triforce_core.building.runners import runner_for
from triforce_core.building.target_kv import target_kv
from triforce_core.config import load_settings
from triforce_core.models.load import ATTENTION

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_target_is_exact(dtype: str) -> None:
    settings = load_settings(device="cuda:0", dtype=dtype, exact="on", target={"kv_pool_tokens": 8192})
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 4}
    model = random_model(num_hidden_layers=4, head_dim=64, vocab_size=32_000, **shape)
    model = model.to("cuda:0", getattr(torch, dtype))
    model.set_attn_implementation(ATTENTION)
    kv = target_kv(model, settings)
    runner = runner_for(model, kv, settings, 9)
    assert make_exact(runner, kv, settings) == ""  # raises, with the reason, where it is not
    print(f"\n{dtype}: passes are padded to multiples of {runner.padding}")
