"""Acceptance of the draft and retrieval tiers by the target on real text, teacher-forced, without sampling or engine.

At T = 0 a position counts 1 if both would write the same token. Above it counts the probability that a draft is
accepted under one of two rules: classical rejection, Σ min(p, q) (Leviathan et al. 2023, corollary 3.6), or shared
noise, with which both tiers draw and must draw the same token (Daliri et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from triforce_core.attention import KERNELS, Kernel, default_kernel
from triforce_core.kv.base import Forward
from triforce_core.kv.full import FullKV
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.selectors import SnapKV
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

TEMPERATURES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.3)  # at which the two rules are compared

Rates = dict[str, float]  # "T0" and "T1" → mean acceptance


def classical_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability that a draw from q is accepted for p by rejection sampling; distributions [rows, vocab] → [rows]."""
    return torch.minimum(p, q).sum(-1)


def shared_noise_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability that p and q give the same token under the same Gumbel noise; distributions [rows, vocab] → [rows].

    Both give v if v has the greatest noisy logit under both, which has the probability 1 / Σ over u of max(p_u / p_v,
    q_u / q_v). With the tokens in descending order of p / q, the larger ratio is p's for v and the tokens before it,
    q's for the rest.
    """
    order = (p / q).nan_to_num(nan=0.0, posinf=torch.inf).argsort(-1, descending=True)
    p, q = p.double().gather(-1, order), q.double().gather(-1, order)
    larger_in_p, larger_in_q = p.cumsum(-1), q.sum(-1, keepdim=True) - q.cumsum(-1)
    return torch.where((p > 0) & (q > 0), 1 / (larger_in_p / p + larger_in_q / q), 0.0).sum(-1)


class Mean(Protocol):
    """A running mean over positions, of which both models' logits are given."""

    def add(self, target: Tensor, draft: Tensor) -> None: ...

    def rates(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class RuleMeans:
    """Running means of the acceptance under both rules, by temperature."""

    sums: dict[float, tuple[float, float]] = field(default_factory=lambda: dict.fromkeys(TEMPERATURES, (0.0, 0.0)))
    greedy: float = 0.0
    count: int = 0

    def add(self, target: Tensor, draft: Tensor) -> None:
        """Count some positions, given both models' logits of them, [positions, vocab]."""
        self.greedy += float((target.argmax(-1) == draft.argmax(-1)).sum())
        self.count += len(target)
        for temperature, (shared, classical) in self.sums.items():
            p, q = (target / temperature).softmax(-1), (draft / temperature).softmax(-1)
            more = shared_noise_acceptance(p, q), classical_acceptance(p, q)
            self.sums[temperature] = (shared + float(more[0].sum()), classical + float(more[1].sum()))

    def rates(self) -> dict[str, Any]:
        """ "T0": the rate at which both write the same token; "T0.2" and so on: that of shared noise, of rejection."""
        by_rule = {
            f"T{temperature:g}": {"shared noise": shared / self.count, "rejection": classical / self.count}
            for temperature, (shared, classical) in self.sums.items()
        }
        return {"T0": self.greedy / self.count, **by_rule}


@dataclass(slots=True)
class _Mean:
    """Running mean of the rates at T = 0 and, under the classical rule, T = 1."""

    greedy: float = 0.0
    sampled: float = 0.0
    count: int = 0

    def add(self, target: Tensor, draft: Tensor) -> None:
        """Count some positions, given both models' logits of them, [positions, vocab]."""
        p, q = target.softmax(-1), draft.softmax(-1)
        self.greedy += float((target.argmax(-1) == draft.argmax(-1)).sum())
        self.sampled += float(classical_acceptance(p, q).sum())
        self.count += len(p)

    def rates(self) -> Rates:
        return {"T0": self.greedy / self.count, "T1": self.sampled / self.count}


def measure_acceptance(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    documents: Sequence[list[int]],
    *,
    mean: Callable[[], Mean] = _Mean,
    on_document: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Acceptance on the last `POSITIONS` tokens of each document, by tier and budget.

    Args:
        target, drafter: loaded with this project's attention (`models.load_model`).
        documents: token ids, each longer than twice the largest budget, so that selecting matters.
        mean: what the rates are, `RuleMeans` to compare the two rules.

    Returns:
        {"retrieval": {"256": {"T0": …, "T1": …}, …}, "draft": {…}}
    """
    means = {tier: {budget: mean() for budget in BUDGETS} for tier in ("retrieval", "draft")}
    for tokens in documents:
        first = len(tokens) - POSITIONS
        exact = _score_target(target, tokens, first, means["retrieval"])
        for budget, rates in means["draft"].items():
            rates.add(exact, _draft_logits(drafter, tokens, first, budget))
        on_document()
    return {tier: {str(budget): each.rates() for budget, each in rows.items()} for tier, rows in means.items()}


def _score_target(target: PreTrainedModel, tokens: list[int], first: int, means: dict[int, Mean]) -> Tensor:
    """The target's logits of the scored positions, [POSITIONS, vocab]; adds the retrieval tier's rates to `means`."""
    full = FullKV(kv_geometry(target), len(tokens), _kernel(target))
    runner = ModelRunner(target, full)
    for stop in range(_PREFILL_CHUNK, first, _PREFILL_CHUNK):
        _forward(runner, tokens, stop, 0)
    _forward(runner, tokens, first, 1)
    exact = []
    for start in range(first, len(tokens), REFRESH):
        stop = min(start + REFRESH, len(tokens))
        snapshots = {size: full.cut(_SEQUENCE, start, ChunkSettings.halved(size, 8), SnapKV()) for size in means}
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
