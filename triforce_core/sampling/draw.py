"""Draw one token per row with shared noise (docs/architecture.md).

Drawing is some forty small operators on the device and copies of a few numbers to it. The host waits once, for the
tokens.
"""

from collections.abc import Callable
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


# The function `noisiest` below, or its compiled form: warped [rows, vocab], keys [rows, 2] int64 -> [rows] int64.
Noisiest = Callable[[Tensor, Tensor], Tensor]


def with_noise(warped: Tensor, keys: Tensor) -> Tensor:
    """Warped logits [rows, vocab] plus the noise of each row, float64. Noise is finite: excluded tokens stay at -inf.

    `keys` [rows, 2] int64 are the `row_keys` of each row.
    """
    first, second = keys.split(1, dim=1)
    return gumbel(first, second, torch.arange(warped.shape[1], device=warped.device)).add_(warped)


def noisiest(warped: Tensor, keys: Tensor) -> Tensor:
    """The vocabulary id of each row's greatest value of `with_noise`, [rows] int64; the lowest id wins a tie."""
    return with_noise(warped, keys).argmax(-1)


def perturbed_logits(logits: Tensor, draws: list[Draw]) -> Tensor:
    """Logits [rows, vocab] → warped ones plus noise, float64, none at temperature 0; a row's argmax is its token."""
    warped, noisy = warp(logits.float(), [d.sampling for d in draws]), noisy_rows(draws)
    if not noisy:
        return warped.double()
    if len(noisy) == len(draws):
        return with_noise(warped, keys_of(draws, noisy, logits.device))
    rows = on_device(noisy, torch.int64, logits.device)
    perturbed = with_noise(warped.index_select(0, rows), keys_of(draws, noisy, logits.device))
    return warped.double().index_copy_(0, rows, perturbed)


def drawn(logits: Tensor, draws: list[Draw], noisiest: Noisiest = noisiest) -> Tensor:
    """Logits [rows, vocab] → the drawn vocabulary id of each row, [rows] int64 on the device. No host sync."""
    noisy = noisy_rows(draws)
    if not noisy:
        return logits.argmax(-1)
    warped, keys = warp(logits.float(), [d.sampling for d in draws]), keys_of(draws, noisy, logits.device)
    if len(noisy) == len(draws):
        return noisiest(warped, keys)
    rows = on_device(noisy, torch.int64, logits.device)
    return warped.argmax(-1).index_copy_(0, rows, noisiest(warped.index_select(0, rows), keys))


def draw_tokens(logits: Tensor, draws: list[Draw]) -> list[int]:
    """Logits [rows, vocab] → the drawn vocabulary id of each row; the lowest id wins a tie. One host sync."""
    return drawn(logits, draws).tolist() if draws else []


def noisy_rows(draws: list[Draw]) -> list[int]:
    return [i for i, draw in enumerate(draws) if draw.sampling.temperature]


def keys_of(draws: list[Draw], rows: list[int], device: torch.device) -> Tensor:
    """The keys of these rows, [rows, 2] int64. The host computes them: on a device they would be fifty operators."""
    return on_device([row_keys(draws[i].seed, draws[i].position) for i in rows], torch.int64, device)
