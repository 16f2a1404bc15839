"""Landmarks in a pool choose what landmarks computed at the cut choose, and are there when a prompt has been read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.random_models import Pair, random_model, random_pair, random_tokens
from tests.stating import Statement, ask, full_kv, geometry, spec
from triforce_core.attention import KERNELS
from triforce_core.building.target_kv import target_kv
from triforce_core.config import load_settings
from triforce_core.kv.full import LEAST_FILLED, FullKV
from triforce_core.kv.landmarks import LandmarkPool
from triforce_core.kv.offloaded import Offload, OffloadedKV
from triforce_core.kv.ranges import Range, size_of
from triforce_core.kv.selectors import LANDMARKS, SELECTORS
from triforce_core.kv.selectors.mean_key import mean_keys
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.messages import Span
from triforce_core.models.runner import ModelRunner
from triforce_tools.bench.fill import fill

CHUNK, LENGTH = 8, 320
CHUNKS = ChunkSettings(64, CHUNK, 16)


@pytest.fixture(scope="module", params=[2, 4], ids="kv_heads={}".format)
def pair(request: pytest.FixtureRequest) -> Pair:
    return random_pair(num_key_value_heads=request.param)


def with_pool(pair: Pair, name: str, offload: Offload | None, pool_tokens: int = 3 * LENGTH) -> ModelRunner:
    kernel, landmark = KERNELS["cpu_flash"], LANDMARKS[name]
    if offload is None:
        return ModelRunner(pair.ours, FullKV(geometry(pair), pool_tokens, kernel, unit=CHUNK, landmark=landmark))
    kv = OffloadedKV(geometry(pair), pool_tokens, kernel, offload, unit=CHUNK, landmark=landmark)
    return ModelRunner(pair.ours, kv)


@pytest.mark.parametrize("where", ["memory", "host", "disk"])
@pytest.mark.parametrize("name", LANDMARKS)
def test_any_history_is_cut_as_without_a_pool(pair: Pair, name: str, where: str, tmp_path: Path) -> None:
    """Texts grow by a few tokens or by many, are rolled back and rewritten, and their slots are used anew."""
    rng, selector = random.Random(name), SELECTORS[name]()
    offload = None if where == "memory" else Offload(1, tmp_path if where == "disk" else None)
    runner = with_pool(pair, name, offload)
    plain = ModelRunner(pair.ours, FullKV(geometry(pair), 3 * LENGTH, KERNELS["cpu_flash"]))
    texts: dict[int, tuple[int, ...]] = {1: (), 2: (), 3: ()}
    for _ in range(40):
        i = rng.choice(sorted(texts))
        if rng.random() < 0.15:
            texts[i] = ()
            for each in (runner, plain):
                each.release([i])
        kept = rng.choice([len(texts[i]), rng.randint(0, len(texts[i]))])
        texts[i] = (texts[i][:kept] + random_tokens(rng.choice([1, 7, 90, 200]), seed=rng.randrange(10**6)))[:LENGTH]
        for each in (runner, plain):
            ask(each, Statement(i, texts[i]), max_length=LENGTH)
        if rng.random() < 0.7:
            position = rng.randint(len(texts[i]) // 2, len(texts[i]))
            found, expected = (full_kv(each).cut(i, position, CHUNKS, selector) for each in (runner, plain))
            assert all(map(torch.equal, found.tensors, expected.tensors))


class Filled:
    """Records which slots' landmarks a pool computes."""

    def __init__(self, pool: LandmarkPool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool, self.fill, self.tokens = pool, pool.fill, 0
        monkeypatch.setattr(pool, "fill", self)

    def __call__(self, layer: int, keys: Tensor, ranges: list[Range]) -> None:
        self.tokens += size_of(ranges)
        self.fill(layer, keys, ranges)


@pytest.mark.parametrize("offload", [None, Offload(1)], ids=["memory", "host"])
def test_the_first_cut_of_a_read_prompt_computes_no_landmarks(
    pair: Pair, offload: Offload | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = with_pool(pair, "mean_key", offload)
    kv, text = full_kv(runner), random_tokens(LENGTH, seed=1)
    for stop in (LEAST_FILLED + 5, 200, 301):  # no whole chunks
        ask(runner, Statement(1, text[:stop]), max_length=LENGTH)
    assert kv.landmarks is not None
    filled = Filled(kv.landmarks, monkeypatch)
    kv.cut(1, 301, CHUNKS, SELECTORS["mean_key"]())
    assert filled.tokens == 0
    ask(runner, Statement(1, text), max_length=LENGTH)
    kv.cut(1, LENGTH, CHUNKS, SELECTORS["mean_key"]())
    kv.cut(1, LENGTH, CHUNKS, SELECTORS["mean_key"]())
    assert filled.tokens == len(kv.keys) * CHUNK, "the chunk that decoding has completed before the recent window"


@pytest.mark.parametrize("offload", [None, Offload(1)], ids=["memory", "host"])
def test_the_first_cut_of_drawn_kv_computes_no_landmarks(
    pair: Pair, offload: Offload | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Benchmarks draw the KV of a prompt, and a real prefill would have left its landmarks."""
    kv = full_kv(with_pool(pair, "mean_key", offload))
    assert kv.landmarks is not None
    text = random_tokens(LENGTH, seed=1)
    for stop in (205, LENGTH):
        fill(kv, Span(1, 0, text[:stop], spec(LENGTH)))
    filled = Filled(kv.landmarks, monkeypatch)
    found = kv.cut(1, LENGTH, CHUNKS, SELECTORS["mean_key"]())
    assert filled.tokens == len(kv.keys) * CHUNK, "of the chunk that was drawn in two parts"
    kv.landmarks.known[:] = False
    assert all(map(torch.equal, found.tensors, kv.cut(1, LENGTH, CHUNKS, SELECTORS["mean_key"]()).tensors))


def test_who_shares_slots_shares_their_landmarks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = with_pool(pair, "mean_key", None)
    kv, text = full_kv(runner), random_tokens(LENGTH, seed=1)
    kv.shares = True
    ask(runner, Statement(1, text[:248]), max_length=LENGTH)
    runner.release([1])
    assert kv.landmarks is not None
    filled = Filled(kv.landmarks, monkeypatch)
    other = kv.open(2, spec(LENGTH), 280, text[:280])
    assert other is not None
    assert other.cached == 248
    ask(runner, Statement(2, text[:280]), max_length=LENGTH)
    kv.cut(2, 280, CHUNKS, SELECTORS["mean_key"]())
    assert filled.tokens == len(kv.keys) * 16, "its own two chunks before the recent window"
    alone = ModelRunner(pair.ours, FullKV(geometry(pair), LENGTH, KERNELS["cpu_flash"]))
    ask(alone, Statement(2, text[:248]), max_length=LENGTH)
    ask(alone, Statement(2, text[:280]), max_length=LENGTH)
    full_kv(alone).cut(2, 280, CHUNKS, SELECTORS["mean_key"]())
    found, expected = (each.held[2].layouts[1].chunks for each in (kv, full_kv(alone)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", [name for name, made in SELECTORS.items() if made().num_queries is not None])
def test_a_request_with_another_selector_is_cut_as_without_a_pool(pair: Pair, name: str) -> None:
    runner, text = with_pool(pair, "mean_key", None), random_tokens(200, seed=2)
    plain = ModelRunner(pair.ours, FullKV(geometry(pair), LENGTH, KERNELS["cpu_flash"]))
    for each in (runner, plain):
        ask(each, Statement(1, text), max_length=LENGTH)
    other = ChunkSettings(64, 4, 16)
    for chunks in (CHUNKS, other):
        found, expected = (full_kv(each).cut(1, 199, chunks, SELECTORS[name]()) for each in (runner, plain))
        assert all(map(torch.equal, found.tensors, expected.tensors))


@pytest.mark.parametrize(
    ("selector", "per_token"),  # of the bytes of a layer's KV
    [("snapkv", 0), ("h2o", 0), ("mean_key", 1 / 16)],
)
def test_the_setting_says_what_is_kept_and_it_is_counted(selector: str, per_token: float) -> None:
    settings = load_settings(retrieval={"selector": selector, "chunk": 8}, target={"kv_pool_tokens": 800})
    kv = target_kv(random_model(), settings)
    assert (kv.landmarks is None) == (per_token == 0)
    kept = sum(layer.nbytes for layer in kv.landmarks.layers) if kv.landmarks else 0
    assert kept == kv.geometry.bytes_per_token * 800 * per_token
    assert kv.landmarks is None or kv.landmarks.landmark is LANDMARKS[selector]
    assert LANDMARKS["mean_key"] is mean_keys
