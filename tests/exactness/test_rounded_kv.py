"""A target with rounded KV is the model that sees all its KV rounded, and its tokens are its own: however a prompt is
cut, whatever drafts, whoever shares the batch, wherever the KV lies.

In float64, where that is a law. Rounding to 8 bits makes steps of what was smooth: in float32 a key now and then lies
so near the edge between two numbers that passes of other shapes round it apart, and what follows from that is no longer
within float32's error. What is left of the law there is tested last; docs/decisions/0016-fp8-kv.md has the figures.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tests.conftest import HeldOut
from tests.exactness.cases import Outcome, finish
from tests.random_models import plain_logits, random_model, random_tokens, with_noise
from tests.rank_process import RankProcess
from triforce_core.config import load_settings
from triforce_core.engine.assembly import (
    draft_proposer,
    load_local_engine,
    retrieval_decoder,
    retrieval_kv,
    target_engine,
)
from triforce_core.engine.sequence import Request
from triforce_core.messages import SamplingParams, Tier
from triforce_core.models.load import ATTENTION, load_model

NUM_TOKENS = 40
TIE = 0.1  # logits: a third of what rounding KV changes; passes of other shapes, in float32, were up to .035 apart
Tokens = tuple[int, ...]


def rounding_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **asked: Any
) -> tuple[Tensor, None]:
    """What transformers calls: the textbook's, causal, over keys and values rounded to 8 bits."""
    key, value = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (key, value))  # none here is beyond the largest
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    future = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    scores = (query @ key.mT * scaling).masked_fill(future, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


AttentionInterface.register("rounding", rounding_attention)


@functools.cache
def models(name: str, dtype: torch.dtype = torch.float64) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Target and drafter; the random one has two query heads on each KV head."""
    if name == "demo":
        target, drafter = (load_model("demo", role, "float32", "cpu") for role in ("target", "drafter"))
    else:
        target = random_model(num_hidden_layers=4)
        target.set_attn_implementation(ATTENTION)
        drafter = with_noise(target, 0.05, seed=1)
    return target.to(dtype), drafter.to(dtype)


def decode(name: str, requests: list[Request], dtype: torch.dtype = torch.float64, **target: Any) -> Outcome:
    """All requests together, three at a time, with rounded KV unless `target` says otherwise."""
    settings = load_settings(
        dtype="float32",
        max_sequences=3,
        target={"kv_dtype": "float8_e4m3fn", "kv_pool_tokens": 1200, **target},
        retrieval={"budget": 64, "chunk": 8, "recent": 16, "refresh_every": 10, "resync_every": 4},
        draft={"window": 60},
    )
    model, drafter = models(name, dtype)
    sparse = retrieval_kv(model, settings)
    decoder = retrieval_decoder(model, sparse, draft_proposer(drafter, settings), settings)
    return finish(target_engine(model, settings, decoder, sparse), requests)


def random_requests(lookaheads: tuple[int, int]) -> list[Request]:
    kinds = [(300, 0.0), (90, 0.8), (1, 1.0), (160, 0.6), (70, 0.0)]
    return [
        Request(random_tokens(length, seed=length), NUM_TOKENS, SamplingParams(temperature), length, lookaheads)
        for length, temperature in kinds
    ]


@functools.cache
def decoded_plainly(prefill_chunk: int) -> list[Tokens]:
    """Each of the random requests alone, with no tier but the target."""
    plain = random_requests((0, 0))
    return [decode("random", [request], prefill_chunk=prefill_chunk).tokens[0] for request in plain]


def next_logits(model: PreTrainedModel, prompt: Tokens, tokens: Tokens) -> Tensor:
    """What the model says, by the definition of rounded KV and in float64, where each of `tokens` follows the text
    before it, [tokens, vocab] float32.
    """
    by_definition = copy.deepcopy(model).to("cpu", torch.float64)
    by_definition.set_attn_implementation("rounding")
    return plain_logits(by_definition, prompt + tokens)[len(prompt) - 1 : -1]


def test_the_target_is_the_model_that_sees_rounded_kv() -> None:
    """Greedy tokens are those of plain passes of transformers with rounded keys and values; else they are others."""
    requests = random_requests((0, 0))
    exact = decode("random", requests, kv_dtype="auto").tokens
    greedy = [i for i, request in enumerate(requests) if request.sampling.temperature == 0]
    for i in greedy:
        tokens = decoded_plainly(2048)[i]
        assert next_logits(models("random")[0], requests[i].prompt, tokens).argmax(-1).tolist() == list(tokens)
        assert tokens != exact[i], "rounding shows"


def test_any_prefill_chunk() -> None:
    assert decoded_plainly(16) == decoded_plainly(2048)


QUICK = [((6, 0), 2048), ((8, 3), 16)]
SLOW = [((1, 1), 16), ((1, 1), 2048), ((6, 0), 16), ((8, 3), 2048), ((16, 4), 16), ((16, 4), 2048)]


@pytest.mark.parametrize(
    ("lookaheads", "prefill_chunk"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_speculation_in_a_batch(lookaheads: tuple[int, int], prefill_chunk: int) -> None:
    outcome = decode("random", random_requests(lookaheads), prefill_chunk=prefill_chunk)
    assert outcome.tokens == decoded_plainly(2048)
    assert sum(tallies[0].accepted for tallies in outcome.tallies) > 20, "drafts were verified together"


@pytest.mark.parametrize(
    ("offload", "resident", "prefill_chunk"),
    [
        ("host", 0, 16),
        pytest.param("disk", 1, 60, marks=pytest.mark.slow),
        pytest.param("host", 2, 2048, marks=pytest.mark.slow),
    ],
)
def test_offloaded(offload: str, resident: int, prefill_chunk: int, tmp_path: Path) -> None:
    path = {"offload_path": str(tmp_path)} if offload == "disk" else {}
    where = {"offload": offload, "resident_layers": resident, "prefill_chunk": prefill_chunk, **path}
    assert decode("random", random_requests((8, 3)), **where).tokens == decoded_plainly(2048)


def test_the_demo_pair(held_out: HeldOut) -> None:
    """And the retrieval tier still drafts well from what it is handed."""
    kinds = [("turtle.py", 400, 0.0), ("inspect.py", 160, 0.8), ("turtle.py", 7, 1.0)]

    def requests(lookaheads: tuple[int, int]) -> list[Request]:
        return [
            Request(held_out(file, length), NUM_TOKENS, SamplingParams(temperature), length, lookaheads)
            for file, length, temperature in kinds
        ]

    outcome = decode("demo", requests((16, 3)), prefill_chunk=100, offload="host")
    plain = [decode("demo", [request]).tokens[0] for request in requests((0, 0))]
    assert outcome.tokens == plain
    assert outcome.acceptances(Tier.TARGET)[0] > 0.7


# -- float32 -----------------------------------------------------------------------------------------------------------


def assert_greedy(model: PreTrainedModel, prompt: Tokens, tokens: Tokens) -> None:
    """Each token is the best by the definition, or as good as."""
    logits = next_logits(model, prompt, tokens)
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (logits.max(1).values - chosen).max() < TIE


@pytest.mark.parametrize("lookaheads", [(0, 0), (8, 3)], ids=str)
def test_in_float32_all_but_ties_are_the_same(lookaheads: tuple[int, int]) -> None:
    requests = [request for request in random_requests(lookaheads) if request.sampling.temperature == 0]
    found = decode("random", requests, torch.float32, prefill_chunk=16)
    for request, tokens in zip(requests, found.tokens, strict=True):
        assert_greedy(models("random", torch.float32)[0], request.prompt, tokens)


@pytest.mark.slow
def test_two_ranks_round_their_own_heads(tmp_path: Path) -> None:
    """Offloaded, too."""
    target = random_model(num_hidden_layers=4)
    target.save_pretrained(tmp_path)
    rounding = {"kv_dtype": "float8_e4m3fn", "kv_pool_tokens": 1000, "offload": "host", "prefill_chunk": 200}
    settings = load_settings(
        dtype="float32",
        max_sequences=2,
        threads={"decode": 1, "prefill": 1},
        target={"model": str(tmp_path), "tensor_parallel": 2, **rounding},
        retrieval={"budget": 128, "recent": 32, "refresh_every": 24},
        draft={"model": "ngram"},
    )
    requests = [request for request in random_requests((8, 3)) if request.sampling.temperature == 0]
    rank = RankProcess()
    try:
        with rank.lead(settings, ("target", "retrieval")) as ranks:
            found = finish(load_local_engine(settings, ranks=ranks), requests)
    finally:
        rank.close()
    for request, tokens in zip(requests, found.tokens, strict=True):
        assert_greedy(target, request.prompt, tokens)
