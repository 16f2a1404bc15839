"""The full cache with rounded KV: whatever a pass is, its tokens see keys and values rounded, their own among them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.random_models import random_tokens
from tests.stating import fragment, spec
from tests.unit.test_attention import textbook
from tests.unit.test_offloaded_kv import Tensors
from tests.unit.test_target_kv import gib_named, refused
from triforce_core.attention import KERNELS, ON_CUDA, ROUNDED, rounded
from triforce_core.config import load_settings
from triforce_core.engine.target_kv import target_kv
from triforce_core.kv.base import Forward, KVGeometry
from triforce_core.kv.full import FullKV
from triforce_core.kv.offloaded import Offload, OffloadedKV
from triforce_core.kv.selectors import MeanKey
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.messages import Span

LAYERS, KV_HEADS, HEADS, DIM, POOL, LENGTH = 4, 2, 4, 16, 800, 120
GEOMETRY = KVGeometry(LAYERS, KV_HEADS, DIM, torch.float32, torch.device("cpu"), rounded=True)
Make = Callable[[str, Path], FullKV]


def in_memory(kernel: str, directory: Path) -> FullKV:
    return FullKV(GEOMETRY, POOL, KERNELS[kernel])


def on_the_host(kernel: str, directory: Path) -> FullKV:
    return OffloadedKV(GEOMETRY, POOL, KERNELS[kernel], Offload(1))


def on_disk(kernel: str, directory: Path) -> FullKV:
    return OffloadedKV(GEOMETRY, POOL, KERNELS[kernel], Offload(0, directory))


everywhere = pytest.mark.parametrize("make", [in_memory, on_the_host, on_disk])


class Texts:
    """Queries, keys and values of texts by layer, whoever asks for them: those of a model without depth."""

    def __init__(self, num_texts: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.queries = torch.randn(num_texts, LAYERS, HEADS, LENGTH, DIM, generator=random)
        self.keys, self.values = torch.randn(2, num_texts, LAYERS, KV_HEADS, LENGTH, DIM, generator=random)
        self.keys[..., 3] *= 300  # an outlier channel, partly beyond what 8 bits can hold
        self.queries[..., 3] /= 300
        self.tokens = [random_tokens(LENGTH, seed=i) for i in range(num_texts)]

    def expected(self, text: int, layer: int, start: int, stop: int) -> Tensor:
        """The textbook's, over the rounded keys and values up to each token, [tokens, heads, head_dim] float64."""
        seen = (rounded(kv[text, layer, :, :stop]) for kv in (self.keys, self.values))
        output, _ = textbook(self.queries[text, layer, :, start:stop], *seen, 0.3, causal=True)
        return output.transpose(0, 1)

    def run(self, kv: FullKV, ends: dict[int, tuple[int, int]]) -> None:
        """One pass that brings each text up to its end, with so many tokens sampled; all layers are compared."""
        forwards = [
            Forward(Span(text, 0, self.tokens[text][:end], spec(LENGTH)), min(num_sampled, end))
            for text, (end, num_sampled) in ends.items()
        ]
        batch = kv.prepare(forwards)
        if not batch.rows:  # all of it is held
            return
        parts = [(row.sequence_id, row.placed.positions) for row in batch.rows]
        for layer in range(LAYERS):
            packed = [
                torch.cat([x[text, layer][:, p.start : p.stop] for text, p in parts], dim=1)
                for x in (self.queries, self.keys, self.values)
            ]
            output = kv.attend(layer, *packed, 0.3, batch)
            expected = torch.cat([self.expected(text, layer, p.start, p.stop) for text, p in parts])
            torch.testing.assert_close(output.double(), expected, atol=2e-5, rtol=0)


@everywhere
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name not in ON_CUDA])
@pytest.mark.parametrize("hole", [None, 1, 7], ids="hole={}".format)
def test_any_history_sees_rounded_kv(make: Make, kernel: str, hole: int | None, tmp_path: Path) -> None:
    """Chunks of any size, passes over many tokens and one, rolled back, several texts together, a pool in pieces."""
    rng = random.Random(f"{kernel} {hole}")
    kv, texts = make(kernel, tmp_path), Texts(3)
    if hole:
        fragment(kv, hole, 3 * LENGTH)
    for _ in range(12):
        some = rng.sample(range(3), rng.randint(1, 3))
        texts.run(kv, {text: (rng.randint(1, LENGTH), rng.choice([0, 1, 1, 9])) for text in some})
    assert not hole or max(len(held.ranges) for held in kv.held.values()) > 1, "the pool was meant to be in pieces"


def test_rounding_shows() -> None:
    """The laws above would not hold of KV that is not rounded, or of own tokens that are not."""
    texts = Texts(1)
    exact, _ = textbook(texts.queries[0, 0], texts.keys[0, 0], texts.values[0, 0], 0.3, causal=True)
    difference = (exact.transpose(0, 1) - texts.expected(0, 0, 0, LENGTH)).abs()
    assert difference.amax((1, 2)).min() > 1e-3, "at every token, the first included"


@everywhere
def test_snapshots_hold_what_the_target_sees(make: Make, tmp_path: Path) -> None:
    """Whole, as changes and as a resync: rounded KV, in the model's dtype."""
    kv, texts, chunks = make("cpu_flash", tmp_path), Texts(1), ChunkSettings(32, 4, 8)
    keys, values = (rounded(x[0]).float() for x in (texts.keys, texts.values))
    texts.run(kv, {0: (100, 1)})
    all_of_it = kv.cut(0, 100, ChunkSettings(LENGTH, 4, 8), MeanKey())
    assert all_of_it.keys.dtype == torch.float32
    assert torch.equal(all_of_it.keys, keys[:, :, :100])
    assert torch.equal(all_of_it.values, values[:, :, :100])
    whole = kv.cut(0, 100, chunks, MeanKey())
    assert torch.equal(whole.keys[:, :, -8:], keys[:, :, 92:100])
    landmarks = kv.held[0].landmarks[0]
    assert landmarks is not None
    torch.testing.assert_close(landmarks, keys[0, :, :92].unflatten(1, (23, 4)).mean(2))  # not rounded once more
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            of_text = {
                tuple(key.tolist()): value for key, value in zip(keys[layer, head], values[layer, head], strict=True)
            }
            for key, value in zip(whole.keys[layer, head], whole.values[layer, head], strict=True):
                assert torch.equal(of_text[tuple(key.tolist())], value)
    texts.run(kv, {0: (LENGTH, 1)})
    changed = kv.cut(0, LENGTH, chunks, MeanKey(), whole.version).changes
    assert changed is not None
    assert changed.keys.dtype == torch.float32
    resynced = kv.resync(0, LENGTH, whole.version)
    assert resynced is not None
    assert torch.equal(resynced.values, values[:, :, 100:])


@everywhere
def test_random_kv_can_be_attended_to(make: Make, tmp_path: Path) -> None:
    kv = make("cpu_flash", tmp_path)
    kv.fill(Span(1, 0, random_tokens(LENGTH, seed=1), spec(LENGTH)))
    [[start, stop]] = kv.held[1].ranges
    for pool in (*kv.keys, *kv.values):
        filled = pool[:, start:stop].float()
        assert filled.isfinite().all()
        assert 0.8 < filled.std() < 1.2
    queries = kv.held[1].queries[LAYERS - 1]
    assert queries is not None
    assert queries.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pools_take_a_byte_a_number(dtype: torch.dtype, tmp_path: Path) -> None:
    """As allocated; all that counts memory counts as much."""
    geometry = replace(GEOMETRY, dtype=dtype)
    assert geometry.bytes_per_token == 2 * LAYERS * KV_HEADS * DIM
    assert replace(geometry, rounded=False).bytes_per_token == geometry.bytes_per_token * dtype.itemsize
    layer_bytes = 2 * KV_HEADS * POOL * DIM
    with Tensors() as tensors:
        FullKV(geometry, POOL, KERNELS["cpu_flash"])
    assert sum(tensors.made) == LAYERS * layer_bytes // POOL * (POOL + 1), "and one slot that is nobody's"
    for offload in (Offload(1), Offload(1, tmp_path)):
        with Tensors() as tensors:
            kv = OffloadedKV(geometry, POOL, KERNELS["cpu_flash"], offload)
        assert sum(tensors.made) == (1 + 2) * layer_bytes + (LAYERS - 1) * layer_bytes
        assert offload.kv_bytes(geometry, POOL) == (3 * layer_bytes, 3 * layer_bytes)
        assert kv.host.nbytes == 3 * layer_bytes


def test_what_crosses_the_bus_has_8_bits() -> None:
    kv, texts = OffloadedKV(GEOMETRY, POOL, KERNELS["cpu_flash"], Offload(1)), Texts(1)
    with Tensors(kv.host) as tensors:
        texts.run(kv, {0: (80, 0)})
        texts.run(kv, {0: (LENGTH, 0)})
    token_bytes = (LAYERS - 1) * 2 * KV_HEADS * DIM
    assert (tensors.kept, tensors.fetched) == (LENGTH * token_bytes, 80 * token_bytes)


@pytest.mark.parametrize("offload", ["none", "host"])
def test_the_settings_round(offload: str) -> None:
    """And room is asked for by what rounded KV takes."""
    model, tokens = KVGeometry(LAYERS, KV_HEADS, DIM, torch.bfloat16, torch.device("cpu")), 10**12
    asked = {
        kv_dtype: load_settings(target={"kv_dtype": kv_dtype, "offload": offload})
        for kv_dtype in ("auto", "float8_e4m3fn")
    }
    kv = target_kv(model, 100, asked["float8_e4m3fn"])
    assert {pool.dtype for pool in (*kv.keys, *kv.values)} == {ROUNDED}
    assert {pool.dtype for pool in target_kv(model, 100, asked["auto"]).keys} == {torch.bfloat16}
    takes = {
        name: gib_named(refused(lambda s=settings: target_kv(model, tokens, s), "target.kv_pool_tokens"))[0]
        for name, settings in asked.items()
    }
    assert takes["float8_e4m3fn"] == pytest.approx(takes["auto"] / 2, rel=1e-3)
