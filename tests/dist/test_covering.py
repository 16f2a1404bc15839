"""The covering set of the exactness tests through three real actors, each with a model of its own."""

from __future__ import annotations

import pytest

from actors.wire import sampling_to_proto
from tests.conftest import HeldOut
from tests.dist.conftest import StartPipeline
from tests.dist.decoding import Tiers
from tests.exactness.cases import CASES, Case, decode_plainly, models, random_prompts
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.engine.sequence import Request

NUM_TOKENS = 300


def request_to_proto(request: Request) -> pb.DecodeRequest:
    return pb.DecodeRequest(
        prompt_token_ids=request.prompt,
        sampling=sampling_to_proto(request.sampling),
        seed=request.seed,
        max_tokens=request.max_tokens,
        lookaheads=gen.Lookaheads(values=request.lookaheads),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_actors_change_no_token(
    case: Case, start_pipeline: StartPipeline, held_out: HeldOut, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prompts = held_out("turtle.py", 3 * case.budget + 100) if case.model == "demo" else random_prompts(case)
    folder = tmp_path_factory.mktemp("models")
    for name, model in zip(("target", "retrieval", "draft"), models(case), strict=True):
        model.save_pretrained(folder / name)
    settings = case.settings
    settings = settings.model_copy(
        update={
            name: getattr(settings, name).model_copy(update={"model": str(folder / name)})
            for name in ("target", "retrieval", "draft")
        }
    )
    expected = decode_plainly(case, NUM_TOKENS, prompts)
    with start_pipeline(settings) as (runner, pipeline):
        tiers = Tiers(pipeline, runner.run)
        decoded = tiers.decode(*map(request_to_proto, case.requests(NUM_TOKENS, prompts)))
        assert [tuple(d.tokens) for d in decoded] == expected
        drafting = [d for d, r in zip(decoded, case.requests(NUM_TOKENS, prompts), strict=True) if all(r.lookaheads)]
        for levels in (d.stats[-1].tallies for d in drafting):
            assert levels[0].proposed > 0, "the retrieval tier took part"
            assert levels[1].proposed > 0, "and the draft tier"
