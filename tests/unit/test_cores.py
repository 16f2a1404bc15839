"""What a process asks of the cores of its node."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

import pytest

from actors import cores
from actors.cores import CPU_LATENCY, keep_awake
from triforce_core.errors import InvalidValueError

FIELD = "placement.cpu_latency_us"


def test_the_request_is_one_native_integer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "latency"
    file.touch()
    monkeypatch.setattr(cores, "CPU_LATENCY", file)
    with keep_awake(300, FIELD):
        assert file.read_bytes() == struct.pack("i", 300)


@pytest.mark.skipif(not os.access(CPU_LATENCY, os.R_OK | os.W_OK), reason="only root may ask, on Linux")
def test_the_request_holds_until_it_is_closed() -> None:
    def longest() -> int:
        """Of what everybody on this machine asks for."""
        return int(struct.unpack("i", CPU_LATENCY.read_bytes())[0])

    before = longest()
    with keep_awake(7, FIELD):
        assert longest() == min(7, before)
        with keep_awake(3, FIELD):
            assert longest() == min(3, before)
        assert longest() == min(7, before)
    assert longest() == before


def test_a_node_that_cannot_be_asked_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And where there is no such device, none is made."""
    missing = tmp_path / "latency"
    monkeypatch.setattr(cores, "CPU_LATENCY", missing)
    message = f"{FIELD}: 0 cannot be asked of its node ([Errno 2] No such file or directory: '{missing}'"
    with pytest.raises(InvalidValueError, match=re.escape(message)):
        keep_awake(0, FIELD)
    assert not missing.exists()
