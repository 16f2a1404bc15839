"""scripts/gpu_check.sh without a GPU: every job of it on a tiny model, killed and resumed, failing and cut off."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts import gpu_check
from scripts.gpu_check import Keep, Worker
from tests.random_models import random_model

ROOT = Path(__file__).parents[3]


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """For a model of two layers on this machine's CPU."""
    random_model(max_position_embeddings=8192).config.save_pretrained(tmp_path)
    given = {"device": "cpu", "dtype": "float32", "geometry": tmp_path / "config.json", "context": 300, "budget": 64}
    given |= {"output": 8, "layers": 2, "tests": "tests/gpu/test_quantization.py"}
    return [f"--{name}={value}" for name, value in given.items()]


def command(wheels: Path, out: Path, seconds: int, *options: str) -> list[str]:
    return [str(ROOT / "scripts" / "gpu_check.sh"), str(wheels), str(out), str(seconds), *options]


ENVIRONMENT = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}


def check(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), env=ENVIRONMENT, capture_output=True, text=True, check=False)


def told(out: Path) -> dict[str, dict[str, Any]]:
    """What the file of each job says."""
    return {path.stem: json.loads(path.read_text()) for path in out.glob("*.json") if path.stem in gpu_check.JOBS}


@pytest.mark.slow
def test_all_jobs_run_killed_half_way_and_resumed(tmp_path: Path, options: list[str]) -> None:
    """All but `served`, which has a test of its own: the process is killed in a job, by its pid, and another one goes
    on by itself; then everything is stopped and begun again. What was done is not repeated.
    """
    out, wheels = tmp_path / "out", tmp_path / "wheels"
    jobs = " ".join(name for name in gpu_check.JOBS if name != "served")
    wheels.mkdir()
    (wheels / "one-1.0-py3-none-any.whl").write_text("no wheel")
    whole = command(wheels, out, 1200, f"--jobs={jobs}", *options)
    with subprocess.Popen(whole, env=ENVIRONMENT, stdout=subprocess.DEVNULL, start_new_session=True) as running:
        while "plain" not in told(out):  # the job after `full` and `profile`
            time.sleep(0.02)
            assert running.poll() is None
        os.killpg(running.pid, signal.SIGKILL)
    before = told(out)
    assert before["full"]["state"] == "done"
    assert len(before) < len(gpu_check.JOBS) - 1
    done = check(wheels, out, 1200, f"--jobs={jobs}", *options)
    found = told(out)
    assert {name: job.get("why") for name, job in found.items()} == dict.fromkeys(jobs.split())
    assert all(job["state"] == "done" for job in found.values())
    assert done.returncode == 0
    assert found["full"] == before["full"]
    assert "failed: one-1.0-py3-none-any.whl" in done.stdout
    full, batch, offload = (found[name]["found"] for name in ("full", "batch", "offload"))
    assert list(full["stages"]) == ["draft", "retrieval", "verify", "cut", "draft_sampled", "prefill"]
    assert list(full["decoding"]) == ["0", "0.6"]
    assert (batch["requests"], batch["context"]) == (6, 300)
    assert (offload["offload"], offload["decoding"]["0"]["lookaheads"]) == ("host", [16, 3])
    assert found["int8"]["found"]["self_drafter_quantization"] == "int8"
    assert list(found["plain"]["found"]) == list(found["generate"]["found"]) == ["300"]
    assert {"draft, greedy", "round, sampled"} < set(found["profile"]["found"])
    assert "skipped" in found["tests"]["found"]["last_lines"][-1]
    assert found["products"]["found"]["down, 4"]["us"] > 0
    assert max(map(max, found["bits"]["found"]["bfloat16, norm"])) == 2048
    with tarfile.open(tmp_path / "out.tgz") as packed:
        assert {"./full.json", "./generate.json", "./tests.log", "./wheels.log"} < set(packed.getnames())
        assert not any("trace_" in name for name in packed.getnames()), "they may be too large"
    assert (out / "trace_greedy.json").is_file()
    assert (tmp_path / "out.kernels.tgz").is_file()


def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **jobs: Callable[[Worker, Keep], None]) -> list[str]:
    monkeypatch.setattr(gpu_check, "JOBS", {name: (job, 1) for name, job in jobs.items()})
    return [str(tmp_path / "out"), "--device=cpu", f"--jobs={' '.join(jobs)}"]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_check", *arguments])
    return gpu_check.main()


def test_after_an_error_another_process_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(worker: Worker, keep: Keep) -> None:
        keep({"before": 1})
        raise RuntimeError("an illegal memory access")

    def works(worker: Worker, keep: Keep) -> None:
        keep({"after": 2})

    arguments = worker(tmp_path, monkeypatch, fails=fails, works=works)
    assert run(monkeypatch, *arguments) == 3
    assert not (tmp_path / "out" / "works.json").exists()
    assert run(monkeypatch, *arguments) == 0
    failed, worked = (json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("fails", "works"))
    assert (failed["state"], failed["found"], failed["begun"]) == ("failed", {"before": 1}, 1)
    assert failed["why"][-1] == "RuntimeError: an illegal memory access"
    assert (worked["state"], worked["found"]) == ("done", {"after": 2})


def test_a_job_that_takes_too_long_is_cut_off_and_leaves_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(worker: Worker, keep: Keep) -> None:
        keep({"first": 1})
        with contextlib.suppress(Exception):  # as where a kernel that does not compile is done without
            time.sleep(30)

    began = time.monotonic()
    arguments = worker(tmp_path, monkeypatch, slow=slow, next=lambda worker, keep: keep({}))
    assert run(monkeypatch, *arguments) == 0
    assert time.monotonic() - began < 10
    slow_job, following = (json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("slow", "next"))
    assert (slow_job["state"], slow_job["found"], slow_job["why"]) == ("cut off", {"first": 1}, "after 1 s")
    assert following["state"] == "done"


def test_a_job_that_kills_its_process_is_begun_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    begun = []
    arguments = worker(tmp_path, monkeypatch, crash=lambda worker, keep: begun.append(1))
    (out / "crash.json").write_text('{"state": "begun", "begun": 2}')
    assert run(monkeypatch, *arguments) == 0
    assert not begun
    assert json.loads((out / "crash.json").read_text())["state"] == "failed"
    (out / "crash.json").write_text('{"state": "begun", "begun": 1, "found": {"kept": 1}}')
    assert run(monkeypatch, *arguments) == 0
    assert begun
    assert json.loads((out / "crash.json").read_text())["found"] == {"kept": 1}


def test_after_the_deadline_nothing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "LEAST_S", 0.5)
    arguments = worker(tmp_path, monkeypatch, long=lambda worker, keep: time.sleep(30), late=lambda worker, keep: None)
    monkeypatch.setitem(gpu_check.JOBS, "long", (gpu_check.JOBS["long"][0], 60))
    assert run(monkeypatch, *arguments, f"--until={time.time() + gpu_check.SPARED_S + 1}") == 0
    assert "late: not begun, time is over" in capsys.readouterr().out
    assert not (tmp_path / "out" / "late.json").exists()
    assert json.loads((tmp_path / "out" / "long.json").read_text())["state"] == "begun", "it may be resumed"


def test_kernels_of_an_earlier_run_are_brought_along(tmp_path: Path, options: list[str]) -> None:
    wheels, kernels = tmp_path / "wheels", tmp_path / "kernels"
    wheels.mkdir()
    (kernels / "triton").mkdir(parents=True)
    (kernels / "triton" / "one.cubin").write_text("a kernel")
    gpu_check.pack(kernels, wheels / "kernels.tgz")
    assert check(wheels, tmp_path / "out", 60, "--jobs=versions", *options).returncode == 0
    assert (tmp_path / "out.kernels" / "triton" / "one.cubin").read_text() == "a kernel"


def test_without_a_gpu_the_first_job_says_so(tmp_path: Path) -> None:
    """A worker that cannot start is not started again and again."""
    assert check(tmp_path, tmp_path / "out", 60, "--jobs=versions").returncode == 0
    versions = told(tmp_path / "out")["versions"]
    assert versions["state"] == "failed"
    assert versions["why"][-1] == "AssertionError: PyTorch sees no GPU"
    unknown = check(tmp_path, tmp_path / "out", 60, "--jobs=full devcie")
    assert unknown.returncode == 2
    assert "invalid jobs_of value: 'full devcie'" in unknown.stderr


@pytest.mark.parametrize("arguments", [[], ["wheels", "out"]], ids=len)
def test_it_says_how_it_is_called(arguments: list[str]) -> None:
    done = subprocess.run(
        [str(ROOT / "scripts" / "gpu_check.sh"), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "usage: scripts/gpu_check.sh WHEELS OUT SECONDS" in done.stderr
