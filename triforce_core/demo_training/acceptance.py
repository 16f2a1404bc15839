"""Acceptance of the draft and retrieval tiers by the target on real text, teacher-forced, without sampling or engine.

At T = 0 a position counts 1 if both would write the same token. At T = 1 it counts Σ min(p, q), the probability
that a draw from q is accepted (Leviathan et al. 2023, corollary 3.6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from triforce_core.attention import KERNELS, Kernel, default_kernel
from triforce_core.kv.base import Forward
from triforce_core.kv.full import FullKV
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.selectors import MeanKey
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.kv.streaming import StreamingKV, WindowSettings
from triforce_core.messages import SamplingParams, SequenceSpec, Span
from triforce_core.models.load import kv_geometry
from triforce_core.models.runner import ModelRunner

BUDGETS = (256, 1024)
POSITIONS = 128  # scored in each document
REFRESH = 32  # positions between two snapshots
_PREFILL_CHUNK = 2048
_SEQUENCE = 0

Rates = dict[str, float]  # "T0" and "T1" → mean acceptance


@dataclass(slots=True)
class _Mean:
    """Running mean of the rates at T = 0 and T = 1."""

    greedy: float = 0.0
    sampled: float = 0.0
    count: int = 0

    def add(self, target: Tensor, draft: Tensor) -> None:
        """Count some positions, given both models' logits of them, [positions, vocab]."""
        p, q = target.softmax(-1), draft.softmax(-1)
        self.greedy += float((target.argmax(-1) == draft.argmax(-1)).sum())
        self.sampled += float(torch.minimum(p, q).sum())
        self.count += len(p)

    def rates(self) -> Rates:
        return {"T0": self.greedy / self.count, "T1": self.sampled / self.count}


def measure_acceptance(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    documents: Sequence[list[int]],
    *,
    on_document: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Rates]]:
    """Acceptance on the last `POSITIONS` tokens of each document, by tier and budget.

    Args:
        target, drafter: loaded with this project's attention (`models.load_model`).
        documents: token ids, each longer than twice the largest budget, so that selecting matters.

    Returns:
        {"retrieval": {"256": {"T0": …, "T1": …}, …}, "draft": {…}}
    """
    means = {tier: {budget: _Mean() for budget in BUDGETS} for tier in ("retrieval", "draft")}
    for tokens in documents:
        first = len(tokens) - POSITIONS
        exact = _score_target(target, tokens, first, means["retrieval"])
        for budget, mean in means["draft"].items():
            mean.add(exact, _draft_logits(drafter, tokens, first, budget))
        on_document()
    return {tier: {str(budget): mean.rates() for budget, mean in rows.items()} for tier, rows in means.items()}


def _score_target(target: PreTrainedModel, tokens: list[int], first: int, means: dict[int, _Mean]) -> Tensor:
    """The target's logits of the scored positions, [POSITIONS, vocab]; adds the retrieval tier's rates to `means`."""
    full = FullKV(kv_geometry(target), len(tokens), _kernel(target))
    runner = ModelRunner(target, full)
    for stop in range(_PREFILL_CHUNK, first, _PREFILL_CHUNK):
        _forward(runner, tokens, stop, 0)
    _forward(runner, tokens, first, 1)
    exact = []
    for start in range(first, len(tokens), REFRESH):
        stop = min(start + REFRESH, len(tokens))
        snapshots = {budget: full.cut(_SEQUENCE, start, ChunkSettings(budget=budget), MeanKey()) for budget in means}
        exact.append(_forward(runner, tokens, stop, stop - start))
        for budget, snapshot in snapshots.items():
            sparse = RetrievalKV(kv_geometry(target), 1, budget, 2 * REFRESH, _kernel(target))
            sparse.deliver(snapshot)
            means[budget].add(exact[-1], _forward(ModelRunner(target, sparse), tokens, stop, stop - start))
    return torch.cat(exact)


def _draft_logits(drafter: PreTrainedModel, tokens: list[int], first: int, budget: int) -> Tensor:
    """The drafter's logits of the scored positions, one step at a time as in decoding, [POSITIONS, vocab]."""
    window = WindowSettings(sinks=4, window=budget - 4)
    runner = ModelRunner(drafter, StreamingKV(kv_geometry(drafter), 1, window, _kernel(drafter)))
    return torch.cat([_forward(runner, tokens, stop, 1) for stop in range(first + 1, len(tokens) + 1)])


def _forward(runner: ModelRunner, tokens: list[int], stop: int, num_sampled: int) -> Tensor:
    spec = SequenceSpec(SamplingParams(), seed=0, prompt_length=len(tokens), max_length=len(tokens))
    logits, batch = runner.forward([Forward(Span(_SEQUENCE, 0, tuple(tokens[:stop]), spec), num_sampled)])
    assert not batch.lacking, "sized for exactly this"
    return logits


def _kernel(model: PreTrainedModel) -> Kernel:
    return KERNELS[default_kernel(model.device.type, str(model.dtype).removeprefix("torch."))]
