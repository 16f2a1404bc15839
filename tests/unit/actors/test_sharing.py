"""What the target may take of a GPU that it shares with lower tiers and with other replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from actors import sharing
from actors.sharing import Occupied, occupied, share_above, share_of
from tests.fake_cuda import Device, fake_cuda
from triforce_core.config import Settings, load_settings
from triforce_core.machine.memory import CONTEXT, Share

GB = 10**9


@pytest.fixture
def gpu() -> Iterator[Device]:
    with fake_cuda(80 * GB) as made:
        yield made


def on_gpu(*gpus: float, **given: Any) -> Settings:
    tiers = zip(("target", "retrieval", "draft"), gpus, strict=True)
    return load_settings(device="cuda", placement={tier: {"gpus": each} for tier, each in tiers}, **given)


def test_only_tiers_on_the_same_gpu_count() -> None:
    below = [Occupied("here", 0.3, 20 * GB), Occupied("there", 0.4, 5 * GB), Occupied("here", 0.05, GB)]
    assert share_of(0.1, "here", below) == Share(pytest.approx(0.45), 21 * GB)
    assert share_of(0.5, "elsewhere", below) == Share(0.5, 0)
    assert share_of(0.9, "here", below) == Share(1.0, 21 * GB), "no more than there is"


class Remote:
    """Stands for a handle of the lower tier's actor."""

    def __init__(self, answer: list[Occupied]) -> None:
        self.occupied, self.answer = self, answer

    def remote(self) -> list[Occupied]:
        return self.answer


@pytest.mark.parametrize(
    ("gpus", "replicas", "share"),
    [
        ((1, 1, 1), 1, Share(1.0)),
        ((0, 0, 0), 1, Share(1.0, 9 * GB)),
        ((0, 0, 0), 4, Share(0.25, 9 * GB)),
        ((0.25, 0.2, 0.05), 2, Share(0.45, 9 * GB)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("gpu")
def test_what_is_reserved_is_shared(
    gpus: tuple[float, ...], replicas: int, share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = [Occupied("GPU-fake", gpus[1], 9 * GB), Occupied("another", gpus[2], GB)]
    monkeypatch.setattr(ray, "get_actor", lambda name: Remote(answer))
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    assert share_above(on_gpu(*gpus, server={"replicas": {"max": replicas}}), "below") == share


@pytest.mark.usefixtures("gpu")
def test_a_lower_tier_that_is_not_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing(name: str) -> object:
        raise ValueError(f"no actor {name}")

    monkeypatch.setattr(sharing.ray, "get_actor", missing)
    assert share_above(on_gpu(0.3, 0.3, 0.1), "below") is None
    assert "one context only: below does not report" in caplog.text


def test_a_tier_reports_its_memory_and_the_snapshots_that_it_awaits(gpu: Device) -> None:
    kept = torch.empty(GB, dtype=torch.uint8, device="cuda")
    settings = on_gpu(0.3, 0.2, 0.1, max_sequences=4)
    group = settings.placement.groups[1]
    [found] = occupied(settings, group, snapshot_bytes=GB // 2)
    assert found == Occupied("GPU-fake", 0.2, CONTEXT + kept.nbytes + 4 * GB // 2)


def test_on_a_cpu_nothing_is_reported() -> None:
    settings = load_settings(server={"replicas": {"max": 2}})
    assert occupied(settings, settings.placement.groups[0]) == []
    assert share_above(settings, "nobody is asked") == Share(0.5)
