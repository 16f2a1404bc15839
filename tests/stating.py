"""How tests of the KV policies state sequences to a runner, as the tiers above it would."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tests.random_models import Pair
from triforce_core.attention import KERNELS
from triforce_core.kv.base import Forward, KVCache, KVGeometry, Lack
from triforce_core.kv.full import FullKV
from triforce_core.kv.snapshot import Snapshot
from triforce_core.messages import GREEDY, SequenceSpec, Span
from triforce_core.models.load import kv_geometry
from triforce_core.models.runner import ModelRunner

Tokens = tuple[int, ...]


class Statement(NamedTuple):
    """The sequence is `tokens`; what is sent begins at `start`, and the last `sampled` rows' logits are wanted."""

    sequence_id: int
    tokens: Tokens
    sampled: int = 1
    start: int = 0


def spec(max_length: int) -> SequenceSpec:
    return SequenceSpec(GREEDY, seed=0, prompt_length=1, max_length=max_length)


def ask(runner: ModelRunner, *statements: Statement, max_length: int = 200) -> dict[int, Tensor | Lack]:
    """One pass over all statements: each sequence's logits, [sampled, vocab], or what it lacks."""
    forwards = [
        Forward(Span(s.sequence_id, s.start, s.tokens[s.start :], None if s.start else spec(max_length)), s.sampled)
        for s in statements
    ]
    logits, batch = runner.forward(forwards)
    answers: dict[int, Tensor | Lack] = dict(batch.lacking)
    for row in batch.rows:
        answers[row.sequence_id], logits = logits[: row.num_sampled], logits[row.num_sampled :]
    assert not len(logits), "logits that belong to no row"
    return answers


def geometry(pair: Pair) -> KVGeometry:
    return kv_geometry(pair.ours)


def full_runner(pair: Pair, pool_tokens: int, kernel: str = "cpu_flash") -> ModelRunner:
    return ModelRunner(pair.ours, FullKV(geometry(pair), pool_tokens, KERNELS[kernel]))


def full_kv(runner: ModelRunner) -> FullKV:
    assert isinstance(runner.kv, FullKV)
    return runner.kv


def fragment(kv: KVCache, hole: int, max_length: int) -> None:
    """Leave free only holes of `hole` slots between sequences of negative ids, enough for one of `max_length`."""
    before = kv.allocator.num_free
    walls = []
    while kv.allocator.num_free >= hole + 1:
        free, wall = kv.allocator.allocate(hole), kv.allocator.allocate(1)
        assert free is not None
        assert wall is not None
        walls.append(free)
    for free in walls:
        kv.allocator.free(free)
    assert before > kv.allocator.num_free >= max_length


def assert_logits(found: Tensor | Lack, expected: Tensor) -> None:
    """Check that logits are equal up to float32 rounding. The logits of the random models have a spread of about 1."""
    assert isinstance(found, Tensor), f"lacking: {found}"
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def num_bytes(snapshot: Snapshot) -> int:
    """The bytes of all tensors of a snapshot, as a hand-over carries them."""
    return sum(tensor.nbytes for tensor in snapshot.tensors)
