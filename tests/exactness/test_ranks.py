"""Tiers that are divided over two processes give the tokens of one process, in float32, over real gloo.

Each case decodes the same requests in one batch with whole tiers and with divided ones, and some alone and plainly.
Acceptance must be the same too: tokens alone would not show a retrieval tier whose KV is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import HeldOut
from tests.exactness.cases import finish
from tests.exactness.test_handover import CountingSink
from tests.random_models import random_model, random_tokens, with_noise
from tests.rank_process import RankProcess
from triforce_core.building.assembly import retrieval_decoder, retrieval_kv, target_engine
from triforce_core.building.draft_model import draft_proposer
from triforce_core.building.loading import load_local_engine
from triforce_core.building.target_kv import target_kv
from triforce_core.config import Settings, load_settings
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request
from triforce_core.errors import InvalidValueError
from triforce_core.kv.snapshot import Snapshot
from triforce_core.messages import SamplingParams
from triforce_core.models.load import load_model
from triforce_core.models.rank_group import Leader
from triforce_core.models.replay import LeadingFullKV, LeadingRetrievalKV

NUM_TOKENS = 40
BOTH = ("target", "retrieval")
LOOKAHEADS = [(8, 3), (5, 2), (0, 4), (4, 0)]


@pytest.fixture(scope="module")
def rank() -> Iterator[RankProcess]:
    process = RankProcess()
    yield process
    process.close()


def saved(folder: Path, family: str) -> dict[str, str]:
    """The folders of three saved models: a random target, and copies of it with noise for the retrieval tier and with
    more noise for the drafter.
    """
    target = random_model(family, num_attention_heads=8, num_key_value_heads=4, head_dim=8, seed=3)
    models = {"target": target, "retrieval": with_noise(target, 0.1, seed=1), "draft": with_noise(target, 0.2, seed=2)}
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return {name: str(folder / name) for name in models}


def settings_for(models: dict[str, str], **more: object) -> Settings:
    return load_settings(
        dtype="float32",
        max_sequences=3,
        threads=1,
        target={"model": models["target"], "prefill_chunk": 100, "kv_pool_tokens": 2000},
        retrieval={"model": models["retrieval"], "budget": 96, "refresh_every": 16, **more},
        draft={"model": models["draft"], "window": 60},
    )


def requests(vocab: int) -> list[Request]:
    """The requests are greedy and sampled, with mixed lookaheads. Some prompts are longer than the budget, and there
    are more requests than can be live.
    """
    return [
        Request(random_tokens(length, seed=length, vocab=vocab), NUM_TOKENS, SamplingParams(temperature), i, lookaheads)
        for i, (length, temperature, lookaheads) in enumerate(
            zip((250, 180, 31, 130), (0.0, 1.0, 0.7, 1.2), LOOKAHEADS, strict=True)
        )
    ]


def plainly(engine: Engine, asked: list[Request]) -> list[tuple[int, ...]]:
    alone = (Request(r.prompt, r.max_tokens, r.sampling, r.seed, (0, 0)) for r in asked)
    return [finish(engine, [request]).tokens[0] for request in alone]


def divided(settings: Settings, ranks: Leader, tiers: tuple[str, ...]) -> Engine:
    """The chain in this process, with these tiers divided over the ranks."""
    own, dtype = settings.retrieval.model, settings.dtype
    if tiers == BOTH:
        return load_local_engine(settings, ranks=ranks)
    target = load_model(settings.target.model, "target", dtype, "cpu", ranks if "target" in tiers else None)
    assert own is not None
    retrieval = load_model(own, "self-drafter", dtype, "cpu", ranks if "retrieval" in tiers else None)
    drafts = draft_proposer(load_model(settings.draft.model, "drafter", dtype, "cpu"), settings)
    sparse = retrieval_kv(retrieval, settings)
    if tiers == ("target",):
        full = target_kv(target, settings, group=ranks)
        below = retrieval_decoder(retrieval, sparse, drafts, settings)
        return target_engine(target, settings, below, sparse, kv=LeadingFullKV(full, ranks, gathered=True))
    ranks.barrier()
    full, leading = target_kv(target, settings), LeadingRetrievalKV(sparse, ranks)
    below = retrieval_decoder(retrieval, leading, drafts, settings)
    return target_engine(target, settings, below, Handing(leading), kv=full)


class Handing:
    """The sink of a tier that is elsewhere: it takes whole snapshots."""

    def __init__(self, kv: LeadingRetrievalKV) -> None:
        self.kv = kv
        self.busy, self.confirmed = kv.busy, kv.confirmed

    def deliver(self, snapshot: Snapshot) -> None:
        assert self.kv.take(snapshot)


def with_ranks(settings: Settings) -> Settings:
    return settings.model_copy(update={"target": settings.target.model_copy(update={"tensor_parallel": 2})})


@pytest.mark.parametrize(
    ("family", "tiers", "more"),
    [
        pytest.param("llama", BOTH, {"refresh_every": 5}, marks=pytest.mark.ci),
        pytest.param("qwen2", ("target",), {}, marks=pytest.mark.slow),
        pytest.param("qwen3", ("retrieval",), {"refresh_every": 5}, marks=pytest.mark.slow),
        pytest.param("mistral", BOTH, {}, marks=pytest.mark.slow),
        pytest.param("cohere2", BOTH, {}, marks=pytest.mark.slow),
        pytest.param("gemma3", ("target",), {"refresh_every": 5}, marks=pytest.mark.slow),
        pytest.param("llama", ("target",), {"refresh_every": 5}, marks=pytest.mark.slow),
        pytest.param("llama", ("retrieval",), {}, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_give_the_tokens_of_one_process(
    rank: RankProcess, tmp_path: Path, family: str, tiers: tuple[str, ...], more: dict[str, int]
) -> None:
    settings, asked = settings_for(saved(tmp_path, family), **more), requests(256)
    whole = load_local_engine(settings)
    expected = finish(whole, asked)
    assert expected.tokens == plainly(whole, asked)
    divided_settings = with_ranks(settings)
    with rank.lead(divided_settings, tiers) as ranks:
        engine = divided(divided_settings, ranks, tiers)
        events: Counter[str] = Counter()
        engine.snapshots.sink = CountingSink(engine.snapshots.sink, events)
        outcome = finish(engine, asked)
        assert plainly(engine, asked[1:2]) == expected.tokens[1:2]
    assert outcome.tokens == expected.tokens
    assert outcome.tallies == expected.tallies
    assert events["whole"] >= 3, "of each request that asks for it"
    assert events["changes"] > 3


@pytest.mark.ci
@pytest.mark.parametrize(("offload", "graphs"), [("none", "off"), ("host", "eager")])
def test_the_demo_pair_divided_gives_its_tokens(
    rank: RankProcess, held_out: HeldOut, offload: str, graphs: str
) -> None:
    """The models have eight KV heads, and target and retrieval share their weights. The KV lies in memory or on the
    host, and some passes have a constant shape.
    """
    settings = load_settings(
        dtype="float32",
        max_sequences=2,
        threads=1,
        graphs=graphs,
        target={"kv_pool_tokens": 2000, "offload": offload, "prefill_chunk": 200},
        retrieval={"budget": 128, "refresh_every": 24},
    )
    prompt = held_out("inspect.py", 600)
    asked = [Request(prompt, 80, SamplingParams(t), 5, (8, 3)) for t in (0.0, 0.8)]
    expected = finish(load_local_engine(settings), asked)
    with rank.lead(with_ranks(settings), BOTH) as ranks:
        outcome = finish(load_local_engine(with_ranks(settings), ranks=ranks), asked)
    assert outcome.tokens == expected.tokens
    assert outcome.tallies == expected.tallies


def test_a_rank_without_room_for_its_share_is_heard() -> None:
    settings = load_settings(dtype="float32", max_sequences=1, target={"kv_pool_tokens": 2000})
    without = settings.model_copy(update={"target": settings.target.model_copy(update={"kv_pool_tokens": 10**10})})
    rank = RankProcess()
    refused = pytest.raises(InvalidValueError, match=r"target\.kv_pool_tokens")
    with refused, rank.lead(with_ranks(without), BOTH) as ranks:
        load_local_engine(with_ranks(settings), ranks=ranks)
    rank.process.join(30)
    assert rank.process.exitcode == 1, "a follower does not outlive its leader's group"
