"""Real links, real threads, and every message late by a random time: the tokens are those of plain decoding."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from actors.links import RemoteProposer
from actors.serving import LinkServer, TierServer
from tests.random_models import random_model, random_tokens, with_noise
from triforce_core.building.assembly import local_engine, retrieval_kv, retrieval_verifier, target_engine
from triforce_core.building.draft_model import draft_proposer
from triforce_core.config import load_settings
from triforce_core.doorbell import Doorbell
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request
from triforce_core.messages import Proposal, Proposer, SamplingParams, Tier, Work
from triforce_core.models.load import ATTENTION
from triforce_core.speculation.decoder import SpeculativeDecoder
from triforce_core.speculation.run_ahead import RunAhead

SETTINGS = load_settings(
    dtype="float32",
    max_sequences=4,
    target={"kv_pool_tokens": 4096, "prefill_chunk": 100},
    retrieval={"budget": 64, "chunk": 8, "refresh_every": 24},
    draft={"window": 60},
)
NUM_TOKENS = 40


class Late:
    """A tier whose every message, in and out, is late by up to `most` seconds."""

    def __init__(self, proposer: Proposer, rng: random.Random, most: float) -> None:
        self.proposer, self.rng, self.most = proposer, rng, most

    def wait(self) -> None:
        time.sleep(self.rng.choice([0.0, self.rng.random() * self.most]))

    def submit(self, work: list[Work]) -> None:
        self.wait()
        self.proposer.submit(work)

    def collect(self, timeout_s: float) -> list[Proposal]:
        proposals = self.proposer.collect(timeout_s)
        self.wait()
        return proposals

    def release(self, sequence_ids: list[int]) -> None:
        self.wait()
        self.proposer.release(sequence_ids)


@contextmanager
def served(tier_server: TierServer, ours: Doorbell) -> Iterator[RemoteProposer]:
    """A tier as the one above sees it, over gRPC; `ours` wakes the one above."""
    server = LinkServer("127.0.0.1", tier_server)
    link = RemoteProposer(lambda: server.address, timeout_s=20.0, doorbell=ours)
    try:
        assert link.wait_ready(10.0)
        yield link
    finally:
        link.close()
        server.stop(0.0)
        tier_server.stop()


@functools.cache
def models() -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    target = random_model("llama")
    target.set_attn_implementation(ATTENTION)
    return target, with_noise(target, 0.03, seed=1), with_noise(target, 0.06, seed=2)


@functools.cache
def plain(request: Request) -> tuple[int, ...]:
    alone = Request(request.prompt, request.max_tokens, request.sampling, request.seed, (0, 0))
    return decode(local_engine(models()[0], None, SETTINGS), [alone])[0][0]


def decode(engine: Engine, requests: list[Request]) -> tuple[list[tuple[int, ...]], int]:
    """The tokens of each request, and how many tokens were proposed to the target."""
    ids = [engine.submit(request) for request in requests]
    tokens: dict[int, tuple[int, ...]] = dict.fromkeys(ids, ())
    unfinished, proposed = set(ids), 0
    while unfinished:
        for output in engine.run_once():
            tokens[output.sequence_id] += output.tokens
            if output.finish_reason:
                unfinished.discard(output.sequence_id)
                proposed += output.stats.tallies[0].proposed
    return [tokens[sequence_id] for sequence_id in ids], proposed


requests = st.builds(
    lambda length, temperature, seed, lookaheads: Request(
        random_tokens(length, seed=length), NUM_TOKENS, SamplingParams(temperature), seed, lookaheads
    ),
    length=st.sampled_from([1, 30, 150, 260]),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 3),
    lookaheads=st.sampled_from([(4, 2), (8, 3), (3, 1), (4, 0), (0, 3), (0, 0)]),
)


runs = given(
    batch=st.lists(requests, min_size=1, max_size=4),
    micro_batches=st.integers(1, 3),
    below=st.sampled_from([0, 1, 3, 9]),
    most=st.sampled_from([0.0, 0.002, 0.008]),
    delays=st.integers(0, 999),
)


def changes_no_token(batch: list[Request], micro_batches: int, below: int, most: float, delays: int) -> None:
    target, retrieval, drafter = models()
    bells = {tier: Doorbell() for tier in Tier}
    rng = random.Random(delays)
    sparse = retrieval_kv(retrieval, SETTINGS)
    drafts = Late(draft_proposer(drafter, SETTINGS), rng, most)
    draft_tier = TierServer(drafts, Tier.DRAFT, Tier.RETRIEVAL, bells[Tier.DRAFT])
    with served(draft_tier, bells[Tier.RETRIEVAL]) as draft_link:
        verifier = retrieval_verifier(retrieval, sparse, SETTINGS)
        decoder = SpeculativeDecoder(draft_link, verifier, micro_batches=micro_batches)
        ahead = RunAhead(decoder, below)
        late = Late(ahead, rng, most)
        tier = TierServer(late, Tier.RETRIEVAL, Tier.TARGET, bells[Tier.RETRIEVAL], lambda: ahead.can_run_ahead)
        with served(tier, bells[Tier.TARGET]) as link:
            engine = target_engine(
                target, SETTINGS, link, sparse, micro_batches=micro_batches, doorbell=bells[Tier.TARGET]
            )
            tokens, proposed = decode(engine, batch)
    assert tokens == [plain(request) for request in batch]
    if all(request.lookaheads[0] > 1 for request in batch):
        assert proposed > 0


@pytest.mark.ci
@settings(max_examples=10)
@runs
def test_delays_change_no_token(**run: Any) -> None:
    changes_no_token(**run)


@pytest.mark.slow
@settings(max_examples=60)
@runs
def test_more_delays_change_no_token(**run: Any) -> None:
    changes_no_token(**run)
