"""What is counted over predicted tokens, and the figures of the counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, tensor

from triforce_core.messages import GREEDY, SamplingParams
from triforce_core.sampling.draw import Draw, draw_tokens

SEEDS = range(4)  # of the draws at temperature 1, which are averaged


@dataclass(frozen=True, slots=True)
class Scored:
    """The logits of one stretch, [tokens, vocab] float32, and the tokens drawn of them at temperature 0 and 1."""

    logits: Tensor
    greedy: list[int]
    sampled: list[int]  # of each seed in turn

    @classmethod
    def at(cls, start: int, logits: Tensor) -> Scored:
        """Draws as a tier does: with the noise of each token's position."""
        positions = range(start + 1, start + 1 + len(logits))
        sampled = SamplingParams(temperature=1.0)
        draws = [Draw(sampled, seed, position) for seed in SEEDS for position in positions]
        greedy = draw_tokens(logits, [Draw(GREEDY, 0, position) for position in positions])
        return cls(logits, greedy, draw_tokens(logits.repeat(len(SEEDS), 1), draws))


@dataclass(slots=True)
class Counts:
    """Sums over stretches of one cache."""

    tokens: int = 0
    loss: float = 0.0  # nats
    same_greedy: int = 0
    same_sampled: float = 0.0
    answers: int = 0  # stretches
    right: int = 0  # of which every token would have been written by greedy decoding

    @classmethod
    def of(cls, exact: Scored, own: Scored, truth: Sequence[int]) -> Counts:
        """One stretch: a cache's logits against the full cache's, and against the text.

        Greedy decoding writes the whole answer exactly if each token is the likeliest after those before it, so one
        pass over the answer tells what decoding token by token would.
        """
        nats = F.cross_entropy(own.logits, tensor(truth, device=own.logits.device), reduction="sum")
        same = sum(a == b for a, b in zip(exact.sampled, own.sampled, strict=True)) / len(SEEDS)
        greedy = sum(a == b for a, b in zip(exact.greedy, own.greedy, strict=True))
        return cls(len(truth), float(nats), greedy, same, 1, own.greedy == list(truth))

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def figures(self, tasks: Sequence[str]) -> dict[str, Any]:
        """The figures that the tasks ask for. Agreement is acceptance at temperature 0: both are the share of tokens
        that greedy decoding draws alike, given the same text before them.
        """
        asked: dict[str, Any] = {"tokens": self.tokens}
        if "needle" in tasks:
            asked |= {"answers": self.answers, "recall": self.right / self.answers}
        if "perplexity" in tasks:
            asked["perplexity"] = math.exp(self.loss / self.tokens)
        if "agreement" in tasks:
            asked["agreement"] = self.same_greedy / self.tokens
        if "acceptance" in tasks:
            asked["acceptance"] = {"T0": self.same_greedy / self.tokens, "T1": self.same_sampled / self.tokens}
        return asked
