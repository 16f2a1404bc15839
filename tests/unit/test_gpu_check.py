"""scripts/gpu_check.sh without a GPU: each step fails or runs out of time by itself, and the summary says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from argparse import Namespace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from scripts import gpu_check
from tests.random_models import random_model
from triforce_core.bench import attention, generate
from triforce_core.bench.attention import AttentionCase

USUAL = ["versions", "tests", "fused", "device_quick", "device_full", "attention", "profile", "link"]
ROOT = Path(__file__).parents[2]
# A stand-in for Python: what it is called with is a line of $CALLS, and the real one does all but the steps.
PYTHON = f"""#!/bin/sh
[ "$1" = - ] && exec {sys.executable} "$@"
echo "$@" >> "$CALLS"
cp "$SEEN/summary.json" "$SEEN/$(wc -l < "$CALLS").seen" 2> /dev/null || true
"""


def check(*arguments: str | Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script without a GPU, even where there is one."""
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [str(ROOT / "scripts" / "gpu_check.sh"), *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)


def called(tmp_path: Path, steps: str, seconds: str = "100") -> tuple[list[str], dict[str, Any]]:
    """Run these steps with a stand-in for Python. Return what Python was called with, and the summary."""
    python, calls, out = tmp_path / "python", tmp_path / "calls", tmp_path / "out"
    python.write_text(PYTHON)
    python.chmod(0o755)
    variables = {"PYTHON": str(python), "CALLS": str(calls), "SEEN": str(out), "STEPS": steps}
    done = check(tmp_path / "none", out, seconds, **variables)
    assert done.returncode == 0, done.stderr
    return calls.read_text().splitlines(), json.loads((out / "summary.json").read_text())


@pytest.mark.ci
def test_every_step_is_tried_and_reported(tmp_path: Path) -> None:
    """Each step is tried, although no wheel can be installed. Paths may be relative to the folder from which the script
    is called.
    """
    wheels, out = tmp_path / "wheels", tmp_path / "out"
    wheels.mkdir()
    for name in ("one-1.0-py3-none-any.whl", "other-2.0-py3-none-any.whl"):
        (wheels / name).write_text("no wheel")
    done = check("wheels", "out", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["bad_wheels"] == ["one-1.0-py3-none-any.whl", "other-2.0-py3-none-any.whl"]
    assert [step["step"] for step in summary["steps"]] == USUAL
    for step in summary["steps"]:
        assert step["status"] != 0, f"{step['step']} cannot succeed without a GPU"
        assert step["seconds"] < step["limit_s"] + 30
        assert (out / f"{step['step']}.log").is_file()
        assert f"{step['step']}: failed, {step['status']}" in done.stdout
    assert f"0 of {len(USUAL)} steps done" in done.stdout


def test_what_comes_back_is_two_files(tmp_path: Path) -> None:
    """Traces are apart, because they may be too large."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "trace_draft_greedy.json").write_text("{}")
    called(tmp_path, "link")
    with tarfile.open(tmp_path / "out.tgz") as packed:
        assert {"./summary.json", "./link.log", "./steps.tsv"} < set(packed.getnames())
        assert not any("trace_" in name for name in packed.getnames())
    with tarfile.open(tmp_path / "out.traces.tgz") as packed:
        assert packed.getnames() == ["trace_draft_greedy.json"]


def test_steps_that_are_named_share_the_time_and_one_alone_has_it_all(tmp_path: Path) -> None:
    _, one = called(tmp_path, "device_offload")
    assert [step["step"] for step in one["steps"]] == ["device_offload"]
    assert 90 <= one["steps"][0]["limit_s"] <= 100
    _, several = called(tmp_path, "link plain device_int4")
    limits = {step["step"]: step["limit_s"] for step in several["steps"]}
    assert list(limits) == ["link", "plain", "device_int4"]
    assert limits["link"] == pytest.approx(100 * 4 / 44, abs=2)
    assert limits["plain"] == pytest.approx(100 * 18 / 40, abs=5), "of what is left"
    assert limits["device_int4"] >= 90, "the last has all that the others left"


def test_the_summary_is_there_after_every_step(tmp_path: Path) -> None:
    """If the script is cut off, the summary of the steps before is left."""
    called(tmp_path, "versions link attention")
    steps = [len(json.loads(path.read_text())["steps"]) for path in sorted((tmp_path / "out").glob("*.seen"))]
    assert steps == [1, 2], "when the second and the third began"


def test_a_step_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = check(tmp_path, tmp_path / "out", STEPS="versions devcie_full")
    assert done.returncode == 2
    assert "no step is called devcie_full" in done.stderr
    assert "device_full" in done.stderr
    assert not (tmp_path / "out").exists()


def test_every_step_has_arguments_that_are_understood(tmp_path: Path) -> None:
    known = check(tmp_path, tmp_path / "no", STEPS="?").stderr.split("only ")[1].split()
    calls, _ = called(tmp_path, " ".join(set(known) - {"tests", "fused"}), "1000")
    parsed = {args.out.stem: args for args in (gpu_check.parsed(call.split()[2:]) for call in calls)}
    assert set(parsed) == set(known) - {"tests", "fused"}
    offload, batch, int4 = (parsed[f"device_{name}"] for name in ("offload", "batch", "int4"))
    settings = gpu_check.settings_of(offload)
    assert (settings.target.offload, settings.speculation.lookaheads) == ("host", (16, 3))
    assert (offload.verified, offload.temperatures, offload.acceptance) == ((1, 17), (0.0,), ".94,.6")
    assert (batch.requests, batch.context, gpu_check.settings_of(batch).retrieval.budget) == (6, 19_456, 768)
    assert gpu_check.settings_of(int4).retrieval.quantization == "int4"
    assert (int4.temperatures, int4.verified) == ((0.0, 0.6), (1, 3, 7, 9, 17))


def test_no_wheels_is_said(tmp_path: Path) -> None:
    assert "no wheels in" in check(tmp_path, tmp_path / "out", "1", STEPS="link").stdout


@pytest.mark.parametrize("arguments", [[], ["wheels"]], ids=len)
def test_it_says_how_it_is_called(arguments: list[str]) -> None:
    done = check(*arguments)
    assert done.returncode == 2
    assert "usage: scripts/gpu_check.sh WHEELS OUT" in done.stderr


def test_attention_is_measured_case_by_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one case fails, the other cases are measured."""
    cases = (AttentionCase(4, 2, 3, 600, 700, head_dim=-1), AttentionCase(4, 2, 3, 600, 700, head_dim=16))
    monkeypatch.setattr(attention, "CASES", cases)
    found = gpu_check.attention(Namespace(device="cpu", out=tmp_path / "attention.json"))
    assert found == json.loads((tmp_path / "attention.json").read_text())
    failed, measured = (found[str(case)] for case in cases)
    assert failed.startswith("RuntimeError: ")
    assert measured["attention"][0]["us"] > 0


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Arguments for a tiny model on this machine's CPU."""
    random_model(max_position_embeddings=8192).config.save_pretrained(tmp_path)
    shape = ["--device", "cpu", "--dtype", "float32", "--geometry", str(tmp_path / "config.json"), "--budget", "64"]
    return [str(tmp_path / "found.json"), *shape, "--output", "8", "--prefill", "64"]


def test_a_bench_leaves_its_figures_as_it_goes(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[dict[str, Any]] = []
    monkeypatch.setattr(Path, "replace", lambda part, path: kept.append(json.loads(part.read_text())))
    more = ["--context", "200", "--repeats", "1", "--temperatures", "0", "--requests", "2", "--verified", "3"]
    found = gpu_check.bench(gpu_check.parsed(["bench", *arguments, *more]))
    assert (found["context"], found["requests"], found["geometry"]) == (200, 2, str(tmp_path / "config.json"))
    assert list(found["decoding"]) == ["0"]
    assert list(found["stages"]["verify"]) == ["3"]
    assert "stages" not in kept[0]
    assert len(kept) >= 7


def test_plain_decoding_and_generate_are_measured_at_the_same_contexts(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails at one context must not cost the others."""
    args = gpu_check.parsed(["plain", *arguments, "--context", "4500"])
    ours = gpu_check.plain(args)
    assert list(ours) == ["4096", "4500"]
    assert all(ms > 0 for ms in ours.values())
    whole, passes = generate.generate_ms, count()

    def failing(model: Any, context: int, output: int) -> float:
        if context == 4096:
            raise RuntimeError("no memory")
        # A clock that each pass advances by one second: on a real one, a short run may take longer than a long one.
        clock = Namespace(now=0.0)
        model.register_forward_pre_hook(lambda *_: setattr(clock, "now", float(next(passes))))
        monkeypatch.setattr(generate, "time", Namespace(perf_counter=lambda: clock.now))
        return whole(model, context, output, repeats=1)

    monkeypatch.setattr(generate, "generate_ms", failing)
    theirs = gpu_check.generate(args)
    assert list(theirs) == ["4096", "4500"]
    assert theirs["4096"] == "RuntimeError: no memory"
    assert theirs["4500"] == 1e3, "a token is a pass"
