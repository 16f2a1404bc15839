"""An offloaded target gives the tokens and snapshots of one in memory, bit for bit: offload moves KV and no more."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.conftest import HeldOut
from tests.exactness.cases import finish
from tests.random_models import random_model, random_tokens, with_noise
from triforce_core.building.assembly import retrieval_decoder, retrieval_kv, target_engine
from triforce_core.building.draft_model import draft_proposer
from triforce_core.config import load_settings
from triforce_core.engine.sequence import Request
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.snapshot import Snapshot
from triforce_core.messages import SamplingParams
from triforce_core.models.load import ATTENTION, load_model

LAYERS, NUM_TOKENS = 4, 24
Tokens = tuple[int, ...]


class Outcome(NamedTuple):
    tokens: list[Tokens]
    snapshots: list[tuple[int, int, int, tuple[Tensor, ...]]]  # sequence id, version, position, all KV


class Recorder:
    """Hands snapshots on, and keeps them."""

    def __init__(self, sink: RetrievalKV) -> None:
        self.sink, self.busy, self.confirmed = sink, sink.busy, sink.confirmed
        self.snapshots: list[Snapshot] = []

    def deliver(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)
        self.sink.deliver(snapshot)


@functools.cache
def models(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Target and drafter; the random one has two query heads on each KV head."""
    if name == "demo":
        return load_model("demo", "target", "float32", "cpu"), load_model("demo", "drafter", "float32", "cpu")
    target = random_model(num_hidden_layers=LAYERS)
    target.set_attn_implementation(ATTENTION)
    return target, with_noise(target, 0.05, seed=1)


def decode(name: str, requests: list[Request], **target: Any) -> Outcome:
    """Decode through all three tiers. The pool holds two or three requests at a time, so that slots are used again."""
    selector = "snapkv" if name == "demo" else "mean_key"  # the defaults in memory and with offload
    settings = load_settings(
        dtype="float32",
        max_sequences=3,
        target={"kv_pool_tokens": 500, **target},
        retrieval={"budget": 64, "chunk": 8, "refresh_every": 4, "selector": selector},
        draft={"window": 60},
    )
    model, drafter = models(name)
    sparse = retrieval_kv(model, settings)
    sink = Recorder(sparse)
    decoder = retrieval_decoder(model, sparse, draft_proposer(drafter, settings), settings)
    outcome = finish(target_engine(model, settings, decoder, sink), requests)
    return Outcome(outcome.tokens, [(s.sequence_id, s.version, s.position, s.tensors) for s in sink.snapshots])


def random_requests() -> tuple[Request, ...]:
    kinds = [(200, 0.0, (6, 0)), (90, 0.8, (3, 2)), (1, 1.0, (16, 0)), (160, 0.6, (0, 0)), (70, 0.0, (4, 2))]
    return tuple(
        Request(random_tokens(length, seed=length), NUM_TOKENS, SamplingParams(temperature), length, lookaheads)
        for length, temperature, lookaheads in kinds
    )


@functools.cache
def in_memory(name: str, requests: tuple[Request, ...], prefill_chunk: int) -> Outcome:
    return decode(name, list(requests), prefill_chunk=prefill_chunk)


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found.tokens == expected.tokens
    assert [s[:3] for s in found.snapshots] == [s[:3] for s in expected.snapshots]
    for one, other in zip(found.snapshots, expected.snapshots, strict=True):
        assert len(one[3]) == len(other[3])
        assert all(map(torch.equal, one[3], other[3])), f"snapshot {one[:3]}"


@pytest.mark.parametrize(
    ("offload", "resident", "prefill_chunk"),
    [("host", 0, 60), ("host", 1, 4096), ("host", 3, 60), ("host", LAYERS, 60), ("disk", 0, 4096), ("disk", 2, 60)],
)
def test_random_models(offload: str, resident: int, prefill_chunk: int, tmp_path: Path) -> None:
    requests = random_requests()
    expected = in_memory("random", requests, prefill_chunk)
    carried = [len(s[3]) for s in expected.snapshots]
    assert carried.count(2) >= len(requests) - 1, "whole snapshots"
    assert carried.count(5) > 10, "changes"
    path = {"offload_path": str(tmp_path)} if offload == "disk" else {}
    found = decode(
        "random", list(requests), offload=offload, resident_layers=resident, prefill_chunk=prefill_chunk, **path
    )
    assert_same(found, expected)


def test_the_demo_pair(held_out: HeldOut) -> None:
    requests = tuple(
        Request(held_out(file, length), NUM_TOKENS, SamplingParams(temperature), length, (16, 3))
        for file, length, temperature in [("turtle.py", 300, 0.0), ("inspect.py", 160, 0.8), ("turtle.py", 7, 1.0)]
    )
    found = decode("demo", list(requests), offload="host", resident_layers=1, prefill_chunk=256)
    assert_same(found, in_memory("demo", requests, 256))
