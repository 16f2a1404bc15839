"""What a process asks of the cores of its node."""

from __future__ import annotations

import os
import re
import struct
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.tiers import TierActor
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import load_settings
from triforce_core.errors import InvalidValueError
from triforce_core.machine import cores
from triforce_core.machine.cores import CPU_LATENCY, keep_awake
from triforce_core.messages import Tier


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An ordinary file in the device's place."""
    file = tmp_path / "latency"
    file.touch()
    monkeypatch.setattr(cores, "CPU_LATENCY", file)
    return file


def asked(latency_us: int | None) -> FileIO:
    request = keep_awake(latency_us)
    assert request is not None
    return request


def test_the_request_is_one_native_integer(device: Path) -> None:
    with asked(300):
        assert device.read_bytes() == struct.pack("i", 300)


def test_nothing_is_asked_by_default(device: Path) -> None:
    assert keep_awake(load_settings().placement.cpu_latency_us) is None
    assert not device.read_bytes()


class IdleTier(TierActor):
    """Serves nothing."""

    tier = Tier.DRAFT

    def serve(self, host: str) -> Any:
        return SimpleNamespace(address=host)

    def tier_status(self) -> pb.TierStatus:
        return pb.TierStatus()


def test_a_tier_asks_when_it_starts(device: Path) -> None:
    actor = IdleTier(load_settings(placement={"cpu_latency_us": 5}))
    actor.start()
    assert device.read_bytes() == struct.pack("i", 5)
    assert actor.awake is not None
    assert not actor.awake.closed
    actor.awake.close()


@pytest.mark.skipif(not os.access(CPU_LATENCY, os.R_OK | os.W_OK), reason="only root may ask, on Linux")
def test_the_request_holds_until_it_is_closed() -> None:
    def longest() -> int:
        """The longest latency that everybody on this machine together allows."""
        return int(struct.unpack("i", CPU_LATENCY.read_bytes())[0])

    before = longest()
    with asked(7):
        assert longest() == min(7, before)
        with asked(3):
            assert longest() == min(3, before)
        assert longest() == min(7, before)
    assert longest() == before


def test_a_node_that_cannot_be_asked_is_named(device: Path) -> None:
    """Where the device does not exist, it is not created."""
    device.unlink()
    message = (
        f"placement.cpu_latency_us: 0 cannot be asked of its node: [Errno 2] No such file or directory: '{device}'"
    )
    with pytest.raises(InvalidValueError, match=re.escape(message)):
        keep_awake(0)
    assert not device.exists()
