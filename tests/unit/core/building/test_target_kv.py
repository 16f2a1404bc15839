"""What does not fit is refused before it is allocated, with the bytes that it takes, those there are, and a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers.configuration_utils import PretrainedConfig

from tests.random_models import random_model
from triforce_core.attention import KERNELS
from triforce_core.building.assembly import retrieval_kv
from triforce_core.building.draft_model import draft_proposer
from triforce_core.building.target_kv import check_pool, target_kv
from triforce_core.building.working_memory import Beside, beside_pool, landmark_bytes
from triforce_core.config import SELECTOR_NAMES, Settings, load_settings
from triforce_core.engine.limits import target_limits
from triforce_core.errors import InvalidValueError
from triforce_core.kv.base import KVGeometry
from triforce_core.kv.full import FullKV
from triforce_core.kv.offloaded import Offload, OffloadedKV
from triforce_core.kv.selectors import SELECTORS
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.machine import memory
from triforce_core.messages import GREEDY, SequenceSpec, Span
from triforce_tools.bench.fill import fill

CONFIG = random_model().config
GEOMETRY = KVGeometry(4, 2, 16, torch.bfloat16, torch.device("cpu"))
TOO_MANY = 10**12  # tokens
TOKEN_BYTES = 2 * 4 * 2 * 16 * 2


def gib_named(message: str) -> list[float]:
    """What the KV takes, and what is free."""
    first, *_, last = [float(number) for number in re.findall(r"([\d.]+) GiB", message)]
    return [first, last]


def refused(make: Callable[[], object], *named: str) -> str:
    with pytest.raises(InvalidValueError) as refusal:
        make()
    for part in named:
        assert part in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("target", "layers", "named"),
    [
        ({}, 4, ["in host memory", "lower it, or set target.offload: disk"]),
        ({"offload": "host", "resident_layers": 4}, 4, ["in host memory", "set target.offload: disk"]),
        ({"offload": "host"}, 2, ["in host memory", "lower it"]),
        ({"offload": "host", "resident_layers": 1}, 3, ["lower it or target.resident_layers"]),
        ({"offload": "disk", "resident_layers": 1}, 3, ["in host memory", "lower it or target.resident_layers"]),
    ],
    ids=str,
)
def test_a_pool_beyond_memory(target: dict[str, Any], layers: int, named: list[str], tmp_path: Path) -> None:
    path = {"offload_path": str(tmp_path)} if target.get("offload") == "disk" else {}
    settings = load_settings(target={**target, **path}, retrieval={"selector": "snapkv"})
    message = refused(
        lambda: target_kv(CONFIG, GEOMETRY, TOO_MANY, settings), f"target.kv_pool_tokens: {TOO_MANY} takes ", *named
    )
    takes, free = gib_named(message)
    assert takes == pytest.approx(TOKEN_BYTES * TOO_MANY * layers / 4 / 2**30, rel=1e-3)
    assert 0 < free * 2**30 < psutil.virtual_memory().total
    assert list(tmp_path.iterdir()) == []


def test_on_the_cpu_staging_and_the_offloaded_layers_share_the_memory() -> None:
    """There are four offloaded layers, and staging takes as much as two. Each part would fit by itself."""
    tokens = int(psutil.virtual_memory().available * 0.8) // TOKEN_BYTES
    settings = load_settings(target={"offload": "host"}, retrieval={"selector": "snapkv"})
    message = refused(lambda: target_kv(CONFIG, GEOMETRY, tokens, settings), "set target.offload: disk")
    assert gib_named(message)[0] == pytest.approx(1.5 * TOKEN_BYTES * tokens / 2**30, rel=1e-3, abs=0.01)


@pytest.mark.parametrize("offload", [None, Offload(0), Offload(0, Path("/tmp"))], ids=["none", "host", "disk"])
def test_landmarks_count_in_memory(offload: Offload | None) -> None:
    """They count wherever the KV is."""
    message = refused(lambda: check_pool(offload, GEOMETRY, 100, Beside(landmarks=2**50)), "in host memory")
    assert f"{2**20}.00 GiB" in message
    check_pool(offload, GEOMETRY, 100, Beside(landmarks=2**10))


def test_the_pool_is_checked_with_the_landmarks_of_the_setting() -> None:
    settings = load_settings(retrieval={"selector": "mean_key", "chunk": 16})
    message = refused(lambda: target_kv(CONFIG, GEOMETRY, TOO_MANY, settings))
    _, beside, _ = re.findall(r"([\d.]+) GiB", message)
    assert float(beside) * 2**30 > TOKEN_BYTES * TOO_MANY / 16


def test_a_file_beyond_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part on the device would fit."""
    monkeypatch.setattr(memory, "free_bytes", lambda place: 10**9 if isinstance(place, Path) else 10**12)
    settings = load_settings(target={"offload": "disk", "offload_path": str(tmp_path)})
    message = refused(
        lambda: target_kv(CONFIG, GEOMETRY, 10**7, settings),
        f"in a file in {tmp_path}",
        "lower it, or name another",
        "offload_path",
    )
    assert gib_named(message) == pytest.approx([TOKEN_BYTES * 10**7 / 2**30, 10**9 / 2**30], rel=1e-2)


@pytest.mark.parametrize("kind", ["nowhere", "a file"])
def test_the_path_must_be_a_directory(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    if kind == "a file":
        path.touch()
    settings = load_settings(target={"offload": "disk", "offload_path": str(path)})
    refused(lambda: target_kv(CONFIG, GEOMETRY, 100, settings), "target.offload_path", str(path), "must be a directory")


def test_more_resident_layers_than_there_are() -> None:
    settings = load_settings(target={"offload": "host", "resident_layers": 3})
    refused(lambda: target_limits(random_model().config, settings), "target.resident_layers: 3", "the model's 2 layers")


def many_sequences(settings: Settings) -> object:
    return draft_proposer(random_model(), settings)


def large_snapshots(settings: Settings) -> object:
    return retrieval_kv(random_model(), settings)


@pytest.mark.parametrize(
    ("make", "settings", "named"),
    [
        (many_sequences, {"max_sequences": 10**9}, ["max_sequences: 1000000000 takes", "lower it or draft.window"]),
        (
            large_snapshots,
            {"retrieval": {"budget": 8 * 10**9}},
            ["retrieval.budget: 8000000000 takes", "lower it or max_sequences, 8"],
        ),
    ],
    ids=["draft", "retrieval"],
)
def test_the_other_tiers(make: Callable[[Settings], object], settings: dict[str, Any], named: list[str]) -> None:
    refused(lambda: make(load_settings(**settings)), *named)


@pytest.mark.parametrize("selector", SELECTOR_NAMES)
def test_landmarks_are_reckoned_as_they_are_kept(selector: str) -> None:
    """The landmarks of a whole pool count, in all layers. Where a selector counts attention, so does the mass."""
    kv, settings = FullKV(GEOMETRY, 400, KERNELS["cpu_flash"]), load_settings(retrieval={"selector": selector})
    fill(kv, Span(1, 0, tuple(range(400)), SequenceSpec(GREEDY, 0, 1, 400, selector=selector)))
    kv.cut(1, 400, ChunkSettings(64, 8, 0), SELECTORS[selector]())
    held = kv.held[1]
    kept = [layer for layers in held.landmarks.values() for layer in layers if layer is not None] + held.mass
    reckoned = landmark_bytes(GEOMETRY, settings) * 400
    assert sum(each.nbytes for each in kept) == pytest.approx(reckoned, abs=1)


def test_a_pass_is_no_larger_than_the_pool() -> None:
    """With offload the chunks of a prompt are long. A small pool never has such a chunk."""
    settings = load_settings(target={"offload": "host"})
    small, large = (beside_pool(CONFIG, GEOMETRY, tokens, settings) for tokens in (1000, 10**6))
    assert small.passing < large.passing / 10
    assert small.on_device < 64 << 20


def test_a_configuration_need_not_name_its_widths() -> None:
    config = PretrainedConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=256)
    assert not hasattr(config, "intermediate_size")
    assert beside_pool(config, GEOMETRY, 1000, load_settings()).passing > 0


def test_what_goes_with_the_pool_is_refused_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that fits by itself, but without room for snapshots and passes."""
    settings, pool = load_settings(), 10_000
    needs = beside_pool(CONFIG, GEOMETRY, pool, settings).on_device
    monkeypatch.setattr(memory, "free_bytes", lambda place: TOKEN_BYTES * pool + needs - 1)
    message = refused(lambda: target_kv(CONFIG, GEOMETRY, pool, settings), "GiB for snapshots and passes")
    assert f"target.kv_pool_tokens: {pool} takes" in message
    monkeypatch.setattr(memory, "free_bytes", lambda place: TOKEN_BYTES * pool + needs)
    target_kv(CONFIG, GEOMETRY, pool, settings)


def test_what_is_offloaded_is_what_the_settings_say(tmp_path: Path) -> None:
    kv = target_kv(CONFIG, GEOMETRY, 100, load_settings(target={"offload": "host", "resident_layers": 1}))
    assert isinstance(kv, OffloadedKV)
    assert (kv.resident_layers, len(kv.host)) == (1, 3)
    kv = target_kv(CONFIG, GEOMETRY, 100, load_settings(target={"offload": "disk", "offload_path": str(tmp_path)}))
    assert isinstance(kv, OffloadedKV)
    assert (kv.resident_layers, len(kv.host)) == (0, 4)
    for target in ({}, {"offload": "host", "resident_layers": 4}):
        assert type(target_kv(CONFIG, GEOMETRY, 100, load_settings(target=target))) is FullKV


@pytest.mark.parametrize(
    ("target", "pool"),
    [
        ({"context_length": 1000}, 2000),
        ({}, 16_384),
        ({"context_length": 1000, "offload": "host"}, 1000),
        ({"offload": "host"}, 8192),
        ({"offload": "host", "kv_pool_tokens": 3000}, 3000),
    ],
    ids=str,
)
def test_the_pool_of_a_target_whose_settings_name_none(target: dict[str, Any], pool: int) -> None:
    """On the device it holds two whole contexts. With offload it holds one, because offload is meant for one long
    context.
    """
    assert target_limits(random_model().config, load_settings(target=target)).kv_pool_tokens == pool
