"""What the target may take of a GPU that it shares with lower tiers and with other replicas."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from actors.sharing import Occupied, occupied, share_above, share_of
from actors.supervisor import LOAD_S
from actors.tiers import CONNECT_TIMEOUT_S
from tests.fake_cuda import Device, fake_cuda
from triforce_core.config import Settings, load_settings
from triforce_core.machine.memory import CONTEXT, Share, room

GB = 10**9


@pytest.fixture
def gpu() -> Iterator[Device]:
    with fake_cuda(80 * GB) as made:
        yield made


def on_gpu(*gpus: float, **given: Any) -> Settings:
    tiers = zip(("target", "retrieval", "draft"), gpus, strict=True)
    return load_settings(device="cuda", placement={tier: {"gpus": each} for tier, each in tiers}, **given)


def test_only_tiers_on_the_same_gpu_count() -> None:
    below = [Occupied("here", 0.3, 20 * GB, 2), Occupied("there", 0.4, 5 * GB, 9), Occupied("here", 0.05, GB, 1)]
    assert share_of(0.1, "here", below) == Share(pytest.approx(0.45), 21 * GB, 3)
    assert share_of(0.5, "elsewhere", below) == Share(0.5)
    assert share_of(0.9, "here", below) == Share(1.0, 21 * GB, 3), "no more than there is"


def test_what_is_left_of_a_gpu(gpu: Device) -> None:
    """What lower tiers await is nobody else's; what they have taken is gone already, but counts in a part."""
    kept = torch.empty(GB, dtype=torch.uint8, device="cuda")
    gpu.others, cuda = 30 * GB, torch.device("cuda", 0)
    assert room(cuda, Share()) == 49 * GB
    assert room(cuda, Share(1.0, 30 * GB, 2 * GB)) == 47 * GB
    assert room(cuda, Share(0.5, 10 * GB, 2 * GB)) == 40 * GB - CONTEXT - kept.nbytes - 12 * GB
    gpu.others = 70 * GB
    assert room(cuda, Share(0.5, 10 * GB, 2 * GB)) == 7 * GB, "no more than is free"


class Remote:
    """Stands for a handle of the lower tier's actor."""

    def __init__(self, answer: list[Occupied]) -> None:
        self.occupied, self.answer, self.patience = self, answer, list[float]()

    def remote(self, patience_s: float) -> list[Occupied]:
        self.patience.append(patience_s)
        return self.answer


def as_actor(monkeypatch: pytest.MonkeyPatch, below: Remote, *, again: bool = False) -> None:
    """Let `share_above` run as in a target's actor, which has been started again or not."""
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(was_current_actor_reconstructed=again))
    monkeypatch.setattr(ray, "get_actor", lambda name: below)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)


@pytest.mark.parametrize(
    ("gpus", "replicas", "share"),
    [
        ((1, 1, 1), 1, Share(1.0)),
        ((0, 0, 0), 1, Share(1.0, 9 * GB, 2)),
        ((0, 0, 0), 4, Share(0.25, 9 * GB, 2)),
        ((0.25, 0.2, 0.05), 2, Share(0.45, 9 * GB, 2)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("gpu")
def test_what_is_reserved_is_shared(
    gpus: tuple[float, ...], replicas: int, share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_actor(monkeypatch, Remote([Occupied("GPU-fake", gpus[1], 9 * GB, 2), Occupied("another", gpus[2], GB, 5)]))
    assert share_above(on_gpu(*gpus, server={"replicas": {"max": replicas}}), "below") == share


@pytest.mark.usefixtures("gpu")
def test_requests_do_not_wait_for_a_hung_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first start all tiers load. A target that is started again has less time than its supervisor gives it."""
    below = Remote([])
    for again in (False, True):
        as_actor(monkeypatch, below, again=again)
        share_above(on_gpu(0.3, 0.3, 0.1), "below")
    first, later = below.patience
    assert first > 600
    assert later + CONNECT_TIMEOUT_S < LOAD_S / 2


@pytest.mark.usefixtures("gpu")
def test_a_lower_tier_that_is_not_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing(name: str) -> object:
        raise ValueError(f"no actor {name}")

    as_actor(monkeypatch, Remote([]))
    monkeypatch.setattr(ray, "get_actor", missing)
    assert share_above(on_gpu(0.3, 0.3, 0.1), "below") is None
    assert "one context only: below does not report" in caplog.text


def test_a_tier_reports_its_memory_and_the_snapshots_that_it_awaits(gpu: Device) -> None:
    kept = torch.empty(GB, dtype=torch.uint8, device="cuda")
    settings = on_gpu(0.3, 0.2, 0.1, max_sequences=4)
    group = settings.placement.groups[1]
    [found] = occupied(settings, group, snapshot_bytes=GB // 2)
    assert found == Occupied("GPU-fake", 0.2, CONTEXT + kept.nbytes, 4 * GB // 2)
    full_precision = torch.empty(3 * GB, dtype=torch.uint8, device="cuda")
    del full_precision
    [found] = occupied(settings, group)
    assert found.awaited == 3 * GB, "it loads so again if it dies"


def test_on_a_cpu_nothing_is_reported() -> None:
    settings = load_settings(server={"replicas": {"max": 2}})
    assert occupied(settings, settings.placement.groups[0]) == []
    assert share_above(settings, "nobody is asked") == Share(0.5)
