"""What is counted over predicted tokens, and the figures of the counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from triforce_core.messages import SamplingParams
from triforce_core.sampling.draw import Draw, perturbed_logits
from triforce_core.sampling.warp import warp

TEMPERATURES = (0.0, 0.4, 0.8, 1.0)
SEEDS = range(4)  # of the noise, over which draws are averaged
RANKS = (1, 2, 4, 8)


class Exact:
    """The full cache's logits of one stretch, [tokens, vocab] float32, and what it draws with each seed's noise."""

    def __init__(self, start: int, logits: Tensor) -> None:
        """The stretch begins at the position `start`; as in a tier, the noise is that of each token's position."""
        draws = [Draw(SamplingParams(), seed, start + 1 + row) for seed in SEEDS for row in range(len(logits))]
        self.logits = logits
        self.noise = perturbed_logits(torch.zeros_like(logits).repeat(len(SEEDS), 1), draws)
        self.drawn = {each: self.perturbed(logits, each).argmax(-1, keepdim=True) for each in TEMPERATURES}

    def perturbed(self, logits: Tensor, temperature: float) -> Tensor:
        """The logits with each seed's noise in turn, [seeds * tokens, vocab] float64; each row's greatest is drawn."""
        warped = warped_at(temperature, logits).double().repeat(len(SEEDS), 1)
        return warped + self.noise if temperature else warped


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over stretches of one cache."""

    tokens: int = 0
    answers: int = 0  # stretches
    right: int = 0  # of which every token would have been written by greedy decoding
    # By temperature: the tokens that the full cache draws and that are among the first k of the cache's perturbed
    # logits, in the mean over the seeds, for each k of RANKS; and last Σ min(p, q), the tokens that rejection sampling
    # would accept of one draft for each (Leviathan et al. 2023, corollary 3.6).
    hits: Tensor = field(default_factory=lambda: torch.zeros(len(TEMPERATURES), len(RANKS) + 1, dtype=torch.float64))

    @classmethod
    def of(cls, exact: Exact, logits: Tensor, truth: Sequence[int]) -> Counts:
        """One stretch: a cache's logits [tokens, vocab] against the full cache's, and against the text.

        Greedy decoding writes the whole answer exactly if each token is the likeliest after those before it, so one
        pass over the answer tells what decoding token by token would.
        """
        hits = []
        for temperature in TEMPERATURES:
            ranks = ranks_of(exact.drawn[temperature], exact.perturbed(logits, temperature))
            found = [float((ranks < k).sum()) / len(SEEDS) for k in RANKS]
            p, q = (warped_at(temperature, each).double().softmax(-1) for each in (exact.logits, logits))
            hits.append([*found, float(torch.minimum(p, q).sum()) if temperature else found[0]])
        right = logits.argmax(-1).tolist() == list(truth)
        return cls(len(truth), 1, right, torch.tensor(hits, dtype=torch.float64))

    def __add__(self, other: Counts) -> Counts:
        tokens, answers, right = self.tokens + other.tokens, self.answers + other.answers, self.right + other.right
        return Counts(tokens, answers, right, self.hits + other.hits)

    def figures(self) -> dict[str, Any]:
        """Recall over the stretches, and shares of the tokens by temperature: `acceptance` with this project's shared
        noise; `hits` by k, of which the first is the acceptance; and `rejection`, the acceptance of rejection sampling.
        """
        shares = {f"T{t:g}": row for t, row in zip(TEMPERATURES, (self.hits / self.tokens).tolist(), strict=True)}
        return {
            "tokens": self.tokens,
            "answers": self.answers,
            "recall": self.right / self.answers,
            "acceptance": {name: row[0] for name, row in shares.items()},
            "hits": {name: dict(zip(map(str, RANKS), row[:-1], strict=True)) for name, row in shares.items()},
            "rejection": {name: row[-1] for name, row in shares.items()},
        }


def warped_at(temperature: float, logits: Tensor) -> Tensor:
    return warp(logits, [SamplingParams(temperature=temperature)] * len(logits))


def ranks_of(tokens: Tensor, logits: Tensor) -> Tensor:
    """How many tokens stand before each of `tokens` [rows, 1] in its row of `logits` [rows, vocab]. Of equal ones the
    lower id stands first, as it is drawn.
    """
    own = logits.gather(-1, tokens)
    lower = torch.arange(logits.shape[-1], device=logits.device) < tokens
    return ((logits > own) | ((logits == own) & lower)).sum(-1)
