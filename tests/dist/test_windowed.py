"""Models with sliding windows, and with learned sinks, through three actors."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.wire import sampling_to_proto
from tests.dist.conftest import StartPipeline
from tests.dist.decoding import Tiers
from tests.random_models import IN_WINDOW, random_model, random_tokens
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import load_settings
from triforce_core.messages import SamplingParams

LAYERS = {"num_hidden_layers": 4, "layer_types": IN_WINDOW["layer_types"] * 2}


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_three_actors(family: str, start_pipeline: StartPipeline, tmp_path: Path) -> None:
    random_model(family, **LAYERS).save_pretrained(tmp_path)
    given = load_settings(
        dtype="float32",
        max_sequences=3,
        target={"model": str(tmp_path), "kv_pool_tokens": 4096, "context_length": 1024},
        draft={"model": str(tmp_path), "window": 60},
        retrieval={"budget": 128, "refresh_every": 24},
    )

    def request(length: int, temperature: float, lookaheads: tuple[int, int]) -> pb.DecodeRequest:
        return pb.DecodeRequest(
            prompt_token_ids=random_tokens(length, seed=length),
            sampling=sampling_to_proto(SamplingParams(temperature)),
            max_tokens=60,
            lookaheads=gen.Lookaheads(values=lookaheads),
        )

    kinds = [(600, 0.0), (600, 1.0), (30, 0.7)]
    with start_pipeline(given) as (runner, pipeline):
        tiers = Tiers(pipeline, runner.run)
        alone = [tiers.decode(request(*kind, (0, 0)))[0].tokens for kind in kinds]
        together = tiers.decode(*(request(*kind, (8, 3)) for kind in kinds))
        assert [decoded.tokens for decoded in together] == alone
        tiers.wait_idle()
