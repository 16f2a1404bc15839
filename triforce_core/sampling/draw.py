"""Draw one token per row with shared noise (docs/architecture.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_core.messages import SamplingParams
from triforce_core.sampling.noise import gumbel, row_keys
from triforce_core.sampling.warp import warp
from triforce_core.transfer import on_device


@dataclass(frozen=True, slots=True)
class Draw:
    """The draw of the token at absolute `position` of a request with this seed."""

    sampling: SamplingParams
    seed: int
    position: int


def perturbed_logits(logits: Tensor, draws: list[Draw]) -> Tensor:
    """Logits [rows, vocab] → warped logits plus the noise of each row, float64; rows at temperature 0 get no noise.

    The argmax of a row is its drawn token. Noise is only computed for tokens that warping did not exclude.
    """
    warped = warp(logits.float(), [d.sampling for d in draws])
    perturbed = warped.double()
    noisy = [i for i, d in enumerate(draws) if d.sampling.temperature]
    if not noisy:
        return perturbed
    device = logits.device
    numbers = [noisy, [draws[i].seed for i in noisy], [draws[i].position for i in noisy]]
    rows, seeds, positions = on_device(numbers, torch.int64, device)
    first, second = row_keys(seeds, positions)
    if not any(draws[i].sampling.truncates for i in noisy):
        vocabulary = torch.arange(logits.shape[-1], device=device)
        perturbed[rows] += gumbel(first[:, None], second[:, None], vocabulary)
        return perturbed
    local, token_ids = perturbed[rows].isfinite().nonzero(as_tuple=True)
    perturbed[rows[local], token_ids] += gumbel(first[local], second[local], token_ids)
    return perturbed


def draw_tokens(logits: Tensor, draws: list[Draw]) -> list[int]:
    """Logits [rows, vocab] → the drawn vocabulary id of each row; the lowest id wins a tie. One host sync."""
    if not draws:
        return []
    if any(d.sampling.temperature for d in draws):
        logits = perturbed_logits(logits, draws)
    return logits.argmax(-1).tolist()
