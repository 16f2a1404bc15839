"""Prompt lookup in place of a drafting model, in an actor of its own and inside another tier's: the same tokens."""

from __future__ import annotations

import pytest

from actors.wire import sampling_to_proto
from tests.conftest import HeldOut
from tests.dist.conftest import StartPipeline
from tests.dist.decoding import Tiers
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import load_settings
from triforce_core.messages import Origin, SamplingParams


@pytest.mark.parametrize(
    "colocate",
    [
        pytest.param("draft_with_retrieval", marks=pytest.mark.ci),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("none", "all")),
    ],
)
def test_prompt_lookup_serves_as_the_draft_tier(
    start_pipeline: StartPipeline, held_out: HeldOut, colocate: str
) -> None:
    settings = load_settings(
        dtype="float32",
        max_sequences=2,
        draft={"model": "ngram"},
        placement={"colocate": colocate},
        retrieval={"budget": 256, "refresh_every": 24},
        target={"kv_pool_tokens": 4096},
    )

    def request(lookaheads: tuple[int, int]) -> pb.DecodeRequest:
        return pb.DecodeRequest(
            prompt_token_ids=held_out("turtle.py", 600),
            sampling=sampling_to_proto(SamplingParams(0.0)),
            max_tokens=60,
            lookaheads=gen.Lookaheads(values=lookaheads),
        )

    with start_pipeline(settings) as (runner, pipeline):
        tiers = Tiers(pipeline, runner.run)
        [plain] = tiers.decode(request((0, 0)))
        lookups = tiers.decode(request((8, 3)), request((0, 5)))
        assert [decoded.tokens for decoded in lookups] == [plain.tokens] * 2
        assert all(Origin.LOOKUP in decoded.origins for decoded in lookups)
        assert set(tiers.live()) == {"draft", "retrieval", "target"}
        tiers.wait_idle()
