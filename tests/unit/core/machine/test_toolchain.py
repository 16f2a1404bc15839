"""What compiling for a GPU needs is looked for beforehand, named, and said once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.random_models import random_model
from triforce_core.config import Settings
from triforce_core.errors import InvalidValueError
from triforce_core.machine import toolchain
from triforce_core.machine.toolchain import lacking
from triforce_core.models import fuse as fusing
from triforce_core.models.fallback import say
from triforce_core.models.fuse import fuse, is_fused


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose programs and headers are those of this folder: gcc and Python.h."""
    say.cache_clear()
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    (tmp_path / "Python.h").touch()
    for name in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    return tmp_path


def test_a_machine_with_both_lacks_nothing(machine: Path) -> None:
    assert lacking("cuda") is None


def test_a_cpu_is_not_asked(machine: Path) -> None:
    (machine / "gcc").unlink()
    assert lacking("cpu") is None


def test_no_compiler(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "my-cc")
    assert lacking("cuda") == "there is no C compiler my-cc, which CC names"
    monkeypatch.delenv("CC")
    (machine / "gcc").unlink()
    assert lacking("cuda") == "there is no C compiler: install gcc"


def test_no_headers_unless_a_variable_names_them(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "Python.h").unlink()
    assert lacking("cuda") == "Python.h is not there: install python3-dev"
    (machine / "elsewhere").mkdir()
    (machine / "elsewhere" / "Python.h").touch()
    monkeypatch.setenv("CPATH", f"{machine}:{machine / 'elsewhere'}")
    assert lacking("cuda") is None


def test_on_is_refused_and_auto_says_once_what_is_lacking(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This happens before anything is compiled."""
    (machine / "Python.h").unlink()
    monkeypatch.setattr(fusing, "compile_kernels", lambda model: pytest.fail("nothing is compiled"))
    with pytest.raises(InvalidValueError, match=r"needs a compiler .*Python\.h is not there: install python3-dev"):
        fuse(random_model(), Settings(device="cuda", compile="on"))
    with caplog.at_level(logging.WARNING, logger="triforce_core"):
        for seed in range(2):
            model = random_model(seed=seed)
            assert not fuse(model, Settings(device="cuda"))
            assert not is_fused(model)
    [message] = [record.getMessage() for record in caplog.records]
    assert "no fused kernels, so passes are slower, because compile needs a compiler that works on cuda" in message
    assert "(Python.h is not there" in message
