"""The shared noise: fixed for ever, standard Gumbel, and independent in everything that it is a function of."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor

from triforce_core.sampling.noise import gumbel, mix, row_keys

COUNT = 200_000


def noise(seeds: Tensor | int, positions: Tensor | int, token_ids: Tensor | int) -> Tensor:
    """The noise of (seed, position, token), elementwise over what broadcasts."""
    seeds, positions, token_ids = (torch.as_tensor(x) for x in (seeds, positions, token_ids))
    seeds, positions, token_ids = torch.broadcast_tensors(seeds, positions, token_ids)
    return gumbel(*row_keys(seeds, positions), token_ids)


def oracle(seed: int, position: int, token_id: int) -> float:
    """The definition in unbounded integers. Changing it changes every seeded output: old requests could not resume."""

    def hash32(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x21F0AAAD % 2**32
        x = (x ^ (x >> 15)) * 0x735A2D97 % 2**32
        return x ^ (x >> 15)

    low, high = seed % 2**32, (seed >> 32) % 2**32
    first = hash32(hash32(hash32(low) ^ high) ^ position)
    second = hash32(hash32(hash32(high ^ 0x9E3779B9) ^ low) ^ position ^ 0x85EBCA6B)
    uniform = (hash32(hash32(token_id ^ first) ^ second) + 0.5) / 2**32
    return -math.log(-math.log(uniform))


EXTREMES = [(0, 0, 0), (1, 2, 3), (2**63 - 1, 2**31, 151_935), (2**32, 131_071, 1), (2**32 - 1, 1, 31_999)]

GOLDEN = [1.132578516004063, 2.5220294712026794, 3.1496666258376202, 3.7043307618039503, -0.26466226765540485]


NEGATIVE = [(-1, 2, 3), (-(2**63), 131_071, 1), (-(2**32), 0, 0)]


@pytest.mark.parametrize(("seed", "position", "token_id"), EXTREMES + NEGATIVE)
def test_the_tensors_compute_the_definition(seed: int, position: int, token_id: int) -> None:
    assert noise(seed, position, token_id).item() == pytest.approx(oracle(seed, position, token_id), rel=1e-14)


def test_known_bits() -> None:
    """The values of the first release, in hexadecimal: neither the code nor the definition may drift."""
    words = [int(w) for key in row_keys(torch.tensor([7]), torch.tensor([11])) for w in key]
    assert [f"{w:08x}" for w in words] == ["ef1a5131", "42f47b46"]
    assert [f"{int(mix(torch.tensor(x))):08x}" for x in (0, 1, 0xFFFFFFFF)] == ["00000000", "86d2fa73", "99b5e683"]
    values = [float(noise(*at)) for at in EXTREMES]
    assert values == pytest.approx(GOLDEN, rel=1e-14)


def test_all_64_bits_of_the_seed_matter() -> None:
    seeds = torch.tensor([1, -1, 2**63 - 1, -(2**63), 0, 2**32 - 1])
    assert len(noise(seeds, 5, 9).unique()) == len(seeds)


def test_mix_is_a_bijection() -> None:
    """On 16-bit slices of its domain, high and low, no two inputs meet."""
    low = torch.arange(2**16)
    assert len(mix(torch.cat([low, low << 16])).unique()) == 2**17 - 1  # 0 is in both


@pytest.mark.parametrize("over", ["token_ids", "positions", "seeds", "high seeds"])
def test_values_are_standard_gumbel(over: str) -> None:
    n = torch.arange(COUNT)
    sample = {
        "token_ids": lambda: noise(5, 9, n),
        "positions": lambda: noise(5, n, 9),
        "seeds": lambda: noise(n, 5, 9),
        "high seeds": lambda: noise(n << 40, 5, 9),
    }[over]()
    assert stats.kstest(sample.numpy(), "gumbel_r").pvalue > 1e-3
    euler, variance = 0.5772156649, math.pi**2 / 6
    assert sample.mean().item() == pytest.approx(euler, abs=4 * math.sqrt(variance / COUNT))
    assert sample.var().item() == pytest.approx(variance, rel=0.02)


n = torch.arange(COUNT)
NEIGHBOURS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "next token": lambda: (noise(3, 4, n), noise(3, 4, n + 1)),
    "next position": lambda: (noise(3, n, 4), noise(3, n + 1, 4)),
    "next position, all tokens": lambda: (noise(3, 4, n), noise(3, 5, n)),
    "next seed": lambda: (noise(n, 3, 4), noise(n + 1, 3, 4)),
    "next seed, all tokens": lambda: (noise(6, 4, n), noise(7, 4, n)),
    "high bit of the seed": lambda: (noise(6, 4, n), noise(6 | 1 << 62, 4, n)),
    "sign of the seed": lambda: (noise(n, 4, 1), noise(n - 2**63, 4, 1)),
    "seed and its negative": lambda: (noise(n + 1, 4, 1), noise(-n - 1, 4, 1)),
    "bit 31 and bit 32 of the seed": lambda: (noise(1 << 31, 4, n), noise(1 << 32, 4, n)),
    "seed and position exchanged": lambda: (noise(n, 4, 1), noise(4, n, 1)),
    "seed and token exchanged": lambda: (noise(n, 4, 1), noise(1, 4, n)),
    "position and token exchanged": lambda: (noise(1, n, 4), noise(1, 4, n)),
    "one more here, one less there": lambda: (noise(8, n + 1, 4), noise(9, n, 4)),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_are_independent(name: str) -> None:
    """No correlation, and the joint distribution of the two uniforms is flat on a 16 × 16 grid."""
    pair = torch.stack(NEIGHBOURS[name]())
    assert torch.corrcoef(pair)[0, 1].abs().item() < 4.5 / math.sqrt(COUNT)
    uniform = torch.exp(-torch.exp(-pair))
    cells = (uniform * 16).long().clamp(max=15)
    counts = torch.bincount(cells[0] * 16 + cells[1], minlength=256)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


def test_winners_over_a_vocabulary_are_uniform_and_independent() -> None:
    """What drawing uses: the argmax over the ids of one row, and of the row after it."""
    vocab, rows = 8, 60_000
    winners = noise(1234, torch.arange(rows)[:, None], torch.arange(vocab)).argmax(-1)
    assert stats.chisquare(torch.bincount(winners, minlength=vocab).numpy()).pvalue > 1e-4
    pairs = torch.bincount(winners[:-1] * vocab + winners[1:], minlength=vocab**2)
    assert stats.chisquare(pairs.numpy()).pvalue > 1e-4


def test_a_value_is_the_same_alone_and_inside_a_batch() -> None:
    """Bit for bit, whatever the shape, the order and the strides around it."""
    seeds, positions = torch.arange(3, 40), torch.arange(37) * 1000
    whole = noise(seeds[:, None], positions[:, None], torch.arange(101))
    assert whole.shape == (37, 101)
    for row, token in [(0, 0), (17, 63), (36, 100)]:
        alone = noise(int(seeds[row]), int(positions[row]), token)
        assert alone.item() == whole[row, token].item()
    strided = noise(seeds[::3, None], positions[::3, None], torch.arange(101)[::7])
    assert torch.equal(strided, whole[::3, ::7])
    assert torch.equal(noise(seeds[:, None], positions[:, None], torch.arange(100, -1, -1)), whole.flip(1))
