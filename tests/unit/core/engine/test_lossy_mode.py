"""The lossy mode: what a target that evicts KV decodes, and that everything that tells of it says so."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.random_models import Pair, plain_logits, random_model, random_pair, random_tokens
from tests.stating import Statement, ask, assert_logits, geometry
from triforce_core.attention import KERNELS
from triforce_core.building.assembly import local_engine
from triforce_core.building.inspection import held_of
from triforce_core.building.lossy import lossy_kv
from triforce_core.config import Settings, load_settings
from triforce_core.engine.engine import Engine, run_to_end
from triforce_core.engine.limits import target_limits
from triforce_core.engine.sequence import Request
from triforce_core.errors import InvalidValueError
from triforce_core.kv.lossy import LossyStreamingKV
from triforce_core.kv.streaming import WindowSettings
from triforce_core.messages import GREEDY, SamplingParams, Tier
from triforce_core.models.load import ATTENTION
from triforce_core.models.runner import ModelRunner

POLICIES = ["heavy_hitter", "streaming"]


def lossy(eviction: str = "heavy_hitter", **target: Any) -> Settings:
    return load_settings(
        dtype="float32", max_sequences=2, target={"eviction": eviction, "kv_budget": 32, "prefill_chunk": 64} | target
    )


def engine_of(settings: Settings) -> Engine:
    model = random_model()
    model.set_attn_implementation(ATTENTION)
    return local_engine(model, None, settings)


def decode(engine: Engine, *requests: Request) -> list[tuple[int, ...]]:
    got: dict[int, tuple[int, ...]] = {}
    for output in run_to_end(engine, [*requests]):
        got[output.sequence_id] = got.get(output.sequence_id, ()) + output.tokens
    return [got[i] for i in sorted(got)]


def request(length: int, seed: int = 0, **fields: Any) -> Request:
    given = {"max_tokens": 60, "sampling": SamplingParams(0.8), "seed": seed, "lookaheads": None} | fields
    return Request(random_tokens(length, seed=seed), **given)


# -- the cache of the streaming mode -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Pair:
    return random_pair()


WINDOW = WindowSettings(sinks=4, window=12, slack=6)


def streaming_runner(pair: Pair) -> ModelRunner:
    return ModelRunner(pair.ours, LossyStreamingKV(geometry(pair), 2, WINDOW, KERNELS["cpu_flash"]))


@pytest.mark.parametrize("sampled", [1, 7, 80])
def test_a_streaming_target_sees_sinks_and_a_window_that_moves_at_fixed_positions(pair: Pair, sampled: int) -> None:
    """It does so however the text was chunked, and also for several logits at once, as for the logprobs of a prompt."""
    text, expected = random_tokens(80, seed=1), []
    for end in range(1, 81):
        # The window starts as early as the capacity allows, and only at every sixth position.
        start = next(start for start in itertools.count(4, 6) if 4 + end - start <= WINDOW.capacity)
        assert start == 4 or end - start > WINDOW.window
        expected.append(plain_logits(pair.theirs, text[: min(4, end)] + text[start:end])[-1])
    stepwise, at_once, in_chunks = (streaming_runner(pair) for _ in range(3))
    for end in range(1, 81):
        assert_logits(ask(stepwise, Statement(1, text[:end], 1, end - 1))[1], expected[end - 1][None])
    assert_logits(ask(at_once, Statement(1, text, sampled))[1], torch.stack(expected[-sampled:]))
    for end in range(9, 73, 9):
        nothing = ask(in_chunks, Statement(1, text[:end], 0, end - 9))
        assert nothing == {}, "chunks without logits are not forwarded"
    assert_logits(ask(in_chunks, Statement(1, text, 8, 72))[1], torch.stack(expected[-8:]))


def test_a_streaming_target_that_is_restated(pair: Pair) -> None:
    runner, text = streaming_runner(pair), random_tokens(60, seed=2)
    ask(runner, Statement(1, text))
    for kept in (50, 30, 10, 2):
        other = text[:kept] + random_tokens(9, seed=kept)
        again = ask(streaming_runner(pair), Statement(1, other))[1]
        assert isinstance(again, Tensor)
        assert_logits(ask(runner, Statement(1, other, 1, kept))[1], again)


# -- a local engine ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", POLICIES)
def test_the_tokens_do_not_depend_on_chunks_or_on_other_requests(eviction: str) -> None:
    asked = [request(300, seed=1), request(5, seed=2), request(130, seed=3, sampling=GREEDY), request(64, seed=4)]
    alone = [decode(engine_of(lossy(eviction, prefill_chunk=2048)), each)[0] for each in asked]
    assert decode(engine_of(lossy(eviction)), *asked) == alone
    assert all(len(tokens) == 60 for tokens in alone)


@pytest.mark.parametrize("eviction", POLICIES)
def test_while_all_fits_nothing_is_lost(eviction: str) -> None:
    """Where not all fits, the mode is lossy: tokens differ from the tokens of the full cache."""
    full = engine_of(load_settings(dtype="float32", speculation={"tiers": "target"}))
    short, long = request(20, max_tokens=12), request(200, max_tokens=200)
    assert decode(engine_of(lossy(eviction)), short) == decode(full, short)
    assert decode(engine_of(lossy(eviction)), long) != decode(full, long)


@pytest.mark.parametrize("eviction", POLICIES)
def test_memory_is_fixed_and_no_text_is_too_long_for_it(eviction: str) -> None:
    engine = engine_of(lossy(eviction))
    capacity = 32 + 8
    assert engine.limits.kv_pool_tokens == 2 * capacity == engine.scheduler.kv.allocator.num_slots  # type: ignore[attr-defined]
    engine.submit(request(2000))
    used = set()
    while not engine.idle:
        engine.run_once()
        used.add(engine.status.kv_tokens)
    assert used == {0, capacity}
    assert engine.limits.longest_output(3000) == 8192 - 3000
    assert engine.totals.stats.preempted == 0


def test_only_the_target_is_there() -> None:
    assert [*held_of(engine_of(lossy()))] == [Tier.TARGET]


@pytest.mark.parametrize("eviction", POLICIES)
def test_the_logprobs_of_a_prompt(eviction: str) -> None:
    """The logprobs of a chunk come from several passes. They do not depend on how the prompt is cut into chunks."""
    found = []
    for chunk in (64, 2048):
        scores = [
            score.logprob
            for output in run_to_end(engine_of(lossy(eviction, prefill_chunk=chunk)), [request(200, prompt_logprobs=0)])
            for score in output.prompt_logprobs
        ]
        assert len(scores) == 200
        found.append(torch.tensor(scores[1:]))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)


def test_requests_that_ask_for_speculation_are_refused_by_name() -> None:
    engine = engine_of(lossy())
    with pytest.raises(InvalidValueError) as refusal:
        engine.submit(request(20, lookaheads=(8, 3)))
    assert str(refusal.value) == (
        "lookaheads: (8, 3) must be (0, 0): target.eviction is heavy_hitter, and a target that forgets does not"
        " speculate"
    )
    assert decode(engine, request(20, lookaheads=(0, 0))) == decode(engine, request(20))


# -- settings ----------------------------------------------------------------------------------------------------------


def test_the_settings_of_a_lossy_target_are_those_of_one_that_decodes_alone() -> None:
    settings = lossy()
    assert settings.speculation.effective == (0, 0)
    assert settings.placement.groups[0].tiers == ("target", "retrieval", "draft")
    assert not settings.controlled
    assert load_settings().target.lossy is None
    assert settings.target.lossy == "heavy_hitter keeps 32 tokens of KV of each request and forgets the others"
    assert load_settings(target={"eviction": "streaming"}).target.kept_tokens == 1024


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": {"kv_budget": 64}}, "kv_budget 64 must be null where eviction is none"),
        (
            {"target": {"eviction": "streaming", "heavy_share": 0.2}},
            "heavy_share 0.2 must be 0.5 where eviction is streaming",
        ),
        ({"target": {"eviction": "streaming", "offload": "host"}}, "offload host must be none where eviction is"),
        ({"target": {"eviction": "streaming", "tensor_parallel": 2}}, "tensor_parallel 2 must be 1 where eviction is"),
        ({"target": {"eviction": "streaming", "audit": 0.1}}, "audit 0.1 must be 0 where eviction is streaming"),
        (
            {"target": {"eviction": "streaming", "kv_pool_tokens": 4096}},
            "kv_pool_tokens 4096 must be null where eviction is streaming",
        ),
        (
            {"target": {"eviction": "heavy_hitter"}, "speculation": {"tiers": "retrieval,target"}},
            "tiers retrieval,target must be target where target.eviction is heavy_hitter",
        ),
        (
            {"target": {"eviction": "heavy_hitter"}, "speculation": {"lookaheads": [8, 3]}},
            "lookaheads (8, 3) must be (0, 0) where target.eviction is heavy_hitter",
        ),
        (
            {"target": {"eviction": "heavy_hitter"}, "placement": {"colocate": "none"}},
            "colocate none must be all where target.eviction is heavy_hitter",
        ),
    ],
)
def test_settings_that_contradict_eviction(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError) as refusal:
        load_settings(**given)
    assert message in str(refusal.value)


@pytest.mark.parametrize(("share", "heavy"), [(0, 0), (0.25, 8), (1, 32)])
def test_any_split_of_the_budget(share: float, heavy: int) -> None:
    engine = engine_of(lossy(heavy_share=share))
    sizes = engine.scheduler.kv.settings  # type: ignore[attr-defined]
    assert (sizes.budget, sizes.heavy, sizes.slack) == (32, heavy, 8)
    assert len(decode(engine, request(200))[0]) == 60


@pytest.mark.parametrize("eviction", ["heavy_hitter", "streaming"])
def test_chunks_are_sized_by_the_keys_that_are_held(eviction: str) -> None:
    """In a long text, no token sees more keys than a sequence has slots."""
    kv = lossy_kv(random_model(), lossy(eviction))
    assert [kv.keys_after(tokens) for tokens in (0, 7, kv.slots_each, 100_000)] == [0, 7, kv.slots_each, kv.slots_each]


def test_limits_of_a_lossy_target() -> None:
    config = random_model().config
    assert target_limits(config, lossy()).eviction == "heavy_hitter"
    assert target_limits(config, load_settings()).eviction == "none"
