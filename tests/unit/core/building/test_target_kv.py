"""The target's pool is as large as the settings say or as there is room for. What does not fit is refused, with the
bytes that it takes, those there are, and a remedy.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.fake_cuda import Device, fake_cuda, fake_model
from tests.random_models import random_model
from triforce_core import attention
from triforce_core.building import target_kv as sizing
from triforce_core.building.assembly import retrieval_kv
from triforce_core.building.draft_model import draft_proposer
from triforce_core.building.target_kv import HOST_PART, part_of, target_kv
from triforce_core.config import SELECTOR_NAMES, Settings, load_settings
from triforce_core.engine.limits import target_limits
from triforce_core.errors import InvalidValueError
from triforce_core.kv.full import FullKV
from triforce_core.kv.offloaded import OffloadedKV
from triforce_core.machine import memory
from triforce_core.machine.memory import Share
from triforce_core.messages import GREEDY, SequenceSpec
from triforce_tools.bench.geometry import geometry_of

MODEL = random_model(num_hidden_layers=4)
TOO_MANY = 10**12  # tokens
TOKEN_BYTES = 2 * 4 * 2 * 16 * 4
GPU = 80 * 10**9  # bytes


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
        ({"offload": "host"}, 6, ["in host memory", "lower it, or set target.offload: disk"]),
        ({"offload": "host", "resident_layers": 1}, 6, ["lower it, or set target.offload: disk"]),
        ({"offload": "disk", "resident_layers": 1}, 3, ["in host memory", "lower it or target.resident_layers"]),
    ],
    ids=str,
)
def test_a_pool_beyond_memory(target: dict[str, Any], layers: int, named: list[str], tmp_path: Path) -> None:
    path = {"offload_path": str(tmp_path)} if target.get("offload") == "disk" else {}
    given = {**target, **path, "kv_pool_tokens": TOO_MANY}
    settings = load_settings(target=given, retrieval={"selector": "snapkv"})
    message = refused(lambda: target_kv(MODEL, settings), f"target.kv_pool_tokens: {TOO_MANY} takes ", *named)
    takes, free = gib_named(message)
    assert takes == pytest.approx(TOKEN_BYTES * TOO_MANY * layers / 4 / 2**30, rel=1e-3)
    assert 0 < free * 2**30 < psutil.virtual_memory().total
    assert list(tmp_path.iterdir()) == []


def test_on_the_cpu_staging_and_the_offloaded_layers_share_the_memory() -> None:
    """There are four offloaded layers, and staging takes as much as two. Each part would fit by itself."""
    tokens = int(psutil.virtual_memory().available * 0.8) // TOKEN_BYTES
    settings = load_settings(target={"offload": "host", "kv_pool_tokens": tokens}, retrieval={"selector": "snapkv"})
    message = refused(lambda: target_kv(MODEL, settings), "set target.offload: disk")
    assert gib_named(message)[0] == pytest.approx(1.5 * TOKEN_BYTES * tokens / 2**30, rel=1e-3, abs=0.01)


@pytest.mark.parametrize("offload", ["none", "host", "disk"])
def test_landmarks_count_in_memory(offload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They count wherever the KV is, but for KV on disk: its landmarks are in memory."""
    path = {"offload_path": str(tmp_path)} if offload == "disk" else {}
    target = {"offload": offload, "kv_pool_tokens": 10**5, "context_length": 1000, **path}
    settings = load_settings(target=target, retrieval={"selector": "mean_key", "chunk": 16})
    kept = {"none": 1.0, "host": 1.5, "disk": 0.5}[offload] + 1 / 32  # half of what a key of each chunk takes: no value
    needed = int(TOKEN_BYTES * 10**5 * kept)
    monkeypatch.setattr(memory, "free_bytes", lambda place: 10**12 if isinstance(place, Path) else needed - 1)
    refused(lambda: target_kv(MODEL, settings), "in host memory")
    monkeypatch.setattr(memory, "free_bytes", lambda place: 10**12 if isinstance(place, Path) else needed)
    target_kv(MODEL, settings)


def test_a_file_beyond_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part on the device would fit."""
    monkeypatch.setattr(memory, "free_bytes", lambda place: 10**9 if isinstance(place, Path) else 10**12)
    target = {"offload": "disk", "offload_path": str(tmp_path), "kv_pool_tokens": 10**7}
    settings = load_settings(target=target)
    message = refused(
        lambda: target_kv(MODEL, settings),
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
    refused(lambda: target_kv(MODEL, settings), "target.offload_path", str(path), "must be a directory")


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


def test_what_is_offloaded_is_what_the_settings_say(tmp_path: Path) -> None:
    def made(**target: Any) -> FullKV:
        return target_kv(MODEL, load_settings(target={"kv_pool_tokens": 104, **target}))

    kv = made(offload="host", resident_layers=1)
    assert isinstance(kv, OffloadedKV)
    assert (kv.resident_layers, len(kv.host)) == (1, 3)
    kv = made(offload="disk", offload_path=str(tmp_path))
    assert isinstance(kv, OffloadedKV)
    assert (kv.resident_layers, len(kv.host)) == (0, 4)
    for target in ({}, {"offload": "host", "resident_layers": 4}):
        assert type(made(**target)) is FullKV


@pytest.mark.parametrize(
    ("given", "pool"),
    [
        ({"target": {"context_length": 1000}}, 8 * 1000),
        ({"target": {"context_length": 1000}, "max_sequences": 2}, 2000),
        ({"target": {"context_length": 4000}}, 10_000),
        ({"target": {"context_length": 4000}, "server": {"replicas": {"max": 2}}}, 5000),
        ({"target": {"context_length": 8000}, "server": {"replicas": {"max": 2}}}, 8000),
        ({"target": {"context_length": 1000, "offload": "host"}}, 1000),
        ({"target": {"offload": "host"}}, 8192),
        ({"target": {"context_length": 1000, "kv_pool_tokens": 3000}}, 3000),
    ],
    ids=str,
)
def test_the_pool_on_a_cpu(given: dict[str, Any], pool: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole context for each sequence, but no more than a part of what is free, which replicas divide, and no less
    than one context. With offload one context, because offload is meant for one long context.
    """
    for module in (memory, sizing):
        monkeypatch.setattr(module, "free_bytes", lambda place: int(10_000 * TOKEN_BYTES / HOST_PART))
    settings = load_settings(**given)
    assert target_kv(MODEL, settings, Share(part_of(settings))).allocator.num_slots == pool


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(attention, "can_run", lambda device: True)  # as where PyTorch for CUDA has brought Triton along
    with fake_cuda(GPU) as made:
        made.true_values = lambda mask: 32 * 8 * 512 if mask.shape[-1] > 512 else -(-mask.numel() // 10)
        yield made


def on_gpu(**given: Any) -> Settings:
    return load_settings(device="cuda", dtype="bfloat16", retrieval={"budget": 4096}, **given)


def by_hand(settings: Settings, context: int, rest: int) -> int:
    """The tokens that fit `rest` bytes at the geometry of Llama 3.1 8B, after what is certainly needed beside them."""
    each, snapshots = 2 * 32 * 8 * 128 * 2, settings.max_sequences * 4096  # bytes of a token; tokens
    feed_forward, logits = 3 * 14336 * 2 * min(2048, context), 256 * 128256 * (2 + 4)
    return (rest - max(feed_forward, logits)) // each - snapshots


def test_a_gpu_alone(gpu: Device) -> None:
    """All that it leaves is used, and passes and snapshots fit what is left."""
    model, settings, rooms = fake_model(geometry_of("llama-3.1-8b").target), on_gpu(), list[int]()
    measure = sizing.working_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizing, "working_bytes", lambda *asked: rooms.append(measure(*asked)) or rooms[0])
        pool = target_kv(model, settings).allocator.num_slots
    allowed = by_hand(settings, 131072, GPU - 16_060_522_496)
    assert 0.9 * allowed <= pool <= allowed
    assert gpu.live + rooms[0] <= GPU


def test_passes_that_attend_in_blocks_are_tried(gpu: Device) -> None:
    config = copy.deepcopy(geometry_of("llama-3.1-8b").target)
    config.num_hidden_layers = 2
    kv = target_kv(fake_model(config), on_gpu(target={"context_length": 600}, exact="on"))
    assert kv.in_blocks
    assert kv.allocator.num_slots >= 600
    assert gpu.live <= GPU


def test_three_tiers_and_a_second_replica_on_one_gpu(gpu: Device) -> None:
    """Of each 40 GB the self-drafter in 8 bits and the drafter take 10. The other replica's memory is not counted by
    what it takes, since it may not have taken it yet.
    """
    settings = on_gpu(target={"context_length": 8192}, max_sequences=2, server={"replicas": {"max": 2}})
    model, lower = fake_model(geometry_of("llama-3.1-8b").target), 10 * 10**9
    for others in (0, lower, GPU // 2 + lower):
        gpu.others = others
        pool = target_kv(model, settings, Share(part_of(settings), lower)).allocator.num_slots
        allowed = by_hand(settings, 8192, GPU // 2 - lower - memory.CONTEXT - 16_060_522_496)
        assert 0.9 * allowed <= pool <= allowed


@pytest.mark.parametrize("selector", SELECTOR_NAMES)
@pytest.mark.parametrize("context", [2, 100, 2050, 2100])
@pytest.mark.parametrize("offload", ["none", "host"])
def test_a_trial_leaves_nothing_behind(selector: str, context: int, offload: str, gpu: Device) -> None:
    """With offload, and where there is room for one context only, the pool of the trial is the one that serves."""
    gpu.true_values = lambda mask: -(-mask.numel() // 10)
    settings = load_settings(
        device="cuda",
        dtype="bfloat16",
        target={"context_length": context, "offload": offload},
        retrieval={"budget": 64, "selector": selector},
    )
    kv = target_kv(fake_model(MODEL.config), settings, None)
    slots = -(-context // 8) * 8
    assert kv.allocator.free_ranges == [(0, slots)]
    assert (kv.kept_tokens, kv.held) == (0, {})
    kv.shares = True
    assert kv.open(1, SequenceSpec(GREEDY, 0, 1, context), text=[0] * (context - 1)).cached == 0  # type: ignore[union-attr]


def test_ranks_share_the_memory_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, sizing):
        monkeypatch.setattr(module, "free_bytes", lambda place: int(10_000 * TOKEN_BYTES / HOST_PART))
    settings = load_settings(target={"context_length": 2000, "tensor_parallel": 2})
    assert target_kv(MODEL, settings).allocator.num_slots == 5000


def test_a_lower_tier_that_does_not_say_what_it_takes(gpu: Device) -> None:
    model = fake_model(geometry_of("llama-3.1-8b").target)
    assert target_kv(model, on_gpu(target={"context_length": 8192}), None).allocator.num_slots == 8192


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "target.context_length: 131072 takes 16.00 GiB for KV, and "),
        ({"target": {"kv_pool_tokens": 400_000}}, "target.kv_pool_tokens: 400000 takes 48.83 GiB for KV"),
        ({"max_sequences": 10**6}, "target.context_length: 131072 takes 16.00 GiB for KV, and "),
    ],
    ids=str,
)
def test_a_gpu_without_room(given: dict[str, Any], named: str, gpu: Device) -> None:
    gpu.others = 45 * 10**9
    model = fake_model(geometry_of("llama-3.1-8b").target)
    refused(lambda: target_kv(model, on_gpu(**given)), named, "are free: lower it, or set target.offload: host")


def test_memory_that_runs_out_while_it_is_measured(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*asked: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(sizing, "working_bytes", too_much)
    model = fake_model(geometry_of("llama-3.1-8b").target)
    refused(
        lambda: target_kv(model, on_gpu()),
        "target.context_length: 131072 leaves too little of the memory of cuda:0 for passes and cuts: lower it",
    )
