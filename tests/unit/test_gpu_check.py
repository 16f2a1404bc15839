"""scripts/gpu_check.sh without a GPU: each step fails or runs out of time by itself, and the summary says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from scripts import gpu_check
from triforce_core.bench import attention
from triforce_core.bench.attention import AttentionCase

STEPS = ["versions", "tests", "attention", "device_quick", "device_full", "device_gqa", "profile", "link"]
ROOT = Path(__file__).parents[2]


def check(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Without a GPU, even where there is one."""
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    command = [str(ROOT / "scripts" / "gpu_check.sh"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.ci
def test_every_step_is_tried_and_reported(tmp_path: Path) -> None:
    """Within a second each, also with wheels that do not install."""
    wheels, out = tmp_path / "wheels", tmp_path / "out"
    wheels.mkdir()
    for name in ("one-1.0-py3-none-any.whl", "other-2.0-py3-none-any.whl"):
        (wheels / name).write_text("no wheel")
    done = check(wheels, out, "8")
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["bad_wheels"] == ["one-1.0-py3-none-any.whl", "other-2.0-py3-none-any.whl"]
    assert [step["step"] for step in summary["steps"]] == STEPS
    for step in summary["steps"]:
        assert step["status"] != 0, f"{step['step']} cannot succeed without a GPU"
        assert step["seconds"] < step["limit_s"] + 30
        assert (out / f"{step['step']}.log").is_file()
        assert f"{step['step']}: failed, {step['status']}" in done.stdout
    assert "0 of 8 steps done" in done.stdout


def test_no_wheels_is_said(tmp_path: Path) -> None:
    assert "no wheels in" in check(tmp_path, tmp_path / "out", "1").stdout


@pytest.mark.parametrize("arguments", [[], ["wheels"]], ids=len)
def test_it_says_how_it_is_called(arguments: list[str]) -> None:
    done = check(*arguments)
    assert done.returncode == 2
    assert "usage: scripts/gpu_check.sh WHEELS OUT" in done.stderr


def test_attention_is_measured_case_by_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is there where one fails."""
    cases = (AttentionCase(4, 2, 3, 600, 700, head_dim=-1), AttentionCase(4, 2, 3, 600, 700, head_dim=16))
    monkeypatch.setattr(attention, "CASES", cases)
    found = gpu_check.attention(Namespace(device="cpu", out=tmp_path / "attention.json"))
    assert found == json.loads((tmp_path / "attention.json").read_text())
    failed, measured = (found[str(case)] for case in cases)
    assert failed.startswith("RuntimeError: ")
    assert measured["attention"][0]["us"] > 0
