"""The trainer survives being killed: same data, same loss curve, damaged checkpoints refused by name."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from triforce_tools.demo_training.checkpoint import checkpoints, latest_checkpoint, read_checkpoint, save_checkpoint
from triforce_tools.demo_training.evaluate import EvaluationPlan
from triforce_tools.demo_training.report import Clock

from triforce_core.cli import main
from triforce_core.demo import weights_dir
from triforce_core.models.precision import machine_dtype
from triforce_tools.demo_training.batches import BatchSource
from triforce_tools.demo_training.corpus import Package, build_corpus
from triforce_tools.demo_training.recall import RecallTasks
from triforce_tools.demo_training.settings import DEFAULT_SETTINGS, DemoSettings, load_settings
from triforce_tools.demo_training.train import CannotResumeError, train

TOKENIZER = weights_dir("target") / "tokenizer.json"
TINY = {"hidden_size": 32, "intermediate_size": 32, "layers": 1, "heads": 1, "head_dim": 16, "rope_theta": 1e4}
STAGE = {"length": 64, "batch_tokens": 128, "lr_start": 1.0, "lr_end": 0.1}
STAGE |= {"recall_share": 0.5, "answer_weight": 3.0, "skip_share": 0.5}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_settings(folder: Path, *, steps: int = 12, **changes: Any) -> Path:
    """A settings file with one-layer models and a corpus of one file, both in `folder`."""
    values = yaml.safe_load(DEFAULT_SETTINGS.read_text())
    stages = [{**STAGE, "name": "only", "model": "target", "tokens": 128 * steps}]
    stages.append({**STAGE, "name": "distil", "model": "drafter", "tokens": 128 * 3})
    stages.append({**STAGE, "name": "own", "model": "drafter", "tokens": 128 * 2, "source": "target"})
    values |= {"target": TINY, "drafter": TINY, "stages": stages, "compile": False, "checkpoint_minutes": 0}
    values |= {"cache_dir": str(folder), "tokenizer": str(TOKENIZER), "max_positions": 512, **changes}
    path = folder / "train.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values))
    source = folder / "text.py"
    source.write_text("".join(f"def function_{n}(x):\n    return x + {n}\n" for n in range(400)))
    settings = load_settings(path)
    build_corpus(settings.corpus, TOKENIZER, settings.corpus_dir, [Package("a", "1", "MIT", folder, ("text.py",))])
    return path


def curve(settings: DemoSettings, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (settings.run_dir / f"{name}.jsonl").read_text().splitlines()]


def quietly(settings: DemoSettings, **options: Any) -> str:
    out = StringIO()
    train(settings, threads=1, console=Console(file=out, width=1000), **options)
    return out.getvalue()


def test_the_tokenizer_is_the_installed_pair_s_unless_another_is_named(tmp_path: Path) -> None:
    assert load_settings().tokenizer == TOKENIZER
    assert TOKENIZER.is_file()
    assert load_settings(tokenizer=tmp_path / "given.json").tokenizer == tmp_path / "given.json"
    path = tiny_settings(tmp_path, tokenizer="beside.json")
    assert load_settings(path).tokenizer == tmp_path / "beside.json"


def test_a_batch_is_a_function_of_seed_stage_and_step(tmp_path: Path) -> None:
    settings = load_settings(tiny_settings(tmp_path))
    tokens = build_corpus(settings.corpus, TOKENIZER, settings.corpus_dir).train
    tasks = RecallTasks.from_file(TOKENIZER)
    one = BatchSource(settings, settings.stages[0], tokens, tasks)
    other = BatchSource(settings, settings.stages[0], tokens, tasks)
    for step in (300, 0, 7):  # in any order, over several epochs
        assert all(
            torch.equal(getattr(one.batch(step), name), getattr(other.batch(step), name)) for name in ("ids", "weights")
        )
    assert not torch.equal(one.batch(0).ids, one.batch(1).ids)
    assert torch.equal(one.batch(5).ids[:, 1:], one.batch(5).labels[:, :-1])
    assert int(one.batch(9).positions.diff(dim=1).min()) >= 1
    assert max(int(one.batch(step).positions.max()) for step in range(20)) < settings.max_positions


@contextmanager
def training(path: Path) -> Iterator[subprocess.Popen[str]]:
    """`triforce demo train --resume` with these settings, once it has written two checkpoints; killed in the end."""
    command = [sys.executable, "-m", "triforce_core.cli", "demo", "train", "--settings", str(path), "--resume"]
    run_dir, repository = load_settings(path).run_dir, Path(__file__).parents[3]
    process = subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.PIPE, text=True, cwd=repository)
    try:
        deadline = time.monotonic() + 60
        while len(checkpoints(run_dir, "target")) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.ci
def test_resumed_after_sigkill_the_loss_curve_is_the_same(tmp_path: Path) -> None:
    path = tiny_settings(tmp_path / "killed", steps=4000)
    killed = load_settings(path)
    with training(path):
        pass
    state = latest_checkpoint(killed.run_dir, "target")
    assert state is not None
    done = state["progress"]["step"]
    lines = len(curve(killed, "target"))
    assert lines - done <= 1  # at most one interval, here one step, was lost
    quietly(killed, resume=True, minutes=0.003)

    whole = load_settings(tiny_settings(tmp_path / "whole", steps=4000))
    while not (whole.run_dir / "target.jsonl").is_file() or len(curve(whole, "target")) < done + 3:
        quietly(whole, resume=True, minutes=0.01)
    ours, theirs = curve(killed, "target"), curve(whole, "target")
    common = min(len(ours), len(theirs))
    assert common > done
    assert ours[:common] == theirs[:common]
    assert [line["step"] for line in ours] == list(range(1, len(ours) + 1))


@pytest.mark.ci
def test_sigterm_stops_at_a_step_with_a_checkpoint_of_it(tmp_path: Path) -> None:
    path = tiny_settings(tmp_path, steps=100_000, checkpoint_minutes=0.002)
    with training(path) as process:
        process.terminate()
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "stopped; go on with --resume" in said
    settings = load_settings(path)
    state = latest_checkpoint(settings.run_dir, "target")
    assert state is not None
    assert state["progress"]["step"] == len(curve(settings, "target"))


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_used(tmp_path: Path) -> None:
    settings = load_settings(tiny_settings(tmp_path, steps=5))
    quietly(settings)
    expected = curve(settings, "target")
    newest, before = checkpoints(settings.run_dir, "target")
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    newest.write_bytes(damaged)
    said = quietly(settings, resume=True)
    assert f"{newest}: damaged, refused" in said
    assert "at step 4" in said
    assert curve(settings, "target") == expected
    for path in checkpoints(settings.run_dir, "target"):
        path.write_bytes(b"not a checkpoint")
    with pytest.raises(CannotResumeError, match="every checkpoint of the target is damaged"):
        quietly(settings, resume=True)
    assert before.name == "target-00000004.ckpt"


def test_a_stopped_run_goes_on_to_the_drafter(tmp_path: Path) -> None:
    settings = load_settings(tiny_settings(tmp_path, steps=3))
    assert "go on with --resume" in quietly(settings, minutes=0)
    assert len(curve(settings, "target")) == 1
    quietly(settings, resume=True)
    assert [line["step"] for line in curve(settings, "drafter")] == [1, 2, 3, 4, 5]
    assert (settings.run_dir / "own-00000003.bin").stat().st_size >= 2 * (128 * 2)


def test_another_run_or_corpus_or_geometry_is_not_overwritten(tmp_path: Path) -> None:
    settings = load_settings(tiny_settings(tmp_path, steps=1))
    quietly(settings, minutes=0)
    with pytest.raises(CannotResumeError, match="a run lies here already"):
        quietly(settings)
    wider = settings.target.model_copy(update={"intermediate_size": 64})
    with pytest.raises(CannotResumeError, match="another geometry"):
        quietly(settings.model_copy(update={"target": wider}), resume=True)
    (settings.corpus_dir / "corpus.json").unlink()
    (tmp_path / "text.py").write_text("something = 'else'\n" * 200)
    packages = [Package("a", "1", "MIT", tmp_path, ("text.py",))]
    build_corpus(settings.corpus, TOKENIZER, settings.corpus_dir, packages)
    with pytest.raises(CannotResumeError, match="another corpus"):
        quietly(settings, resume=True)


def test_two_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, "target", step, {"step": step})
    assert [read_checkpoint(path)["step"] for path in checkpoints(tmp_path, "target")] == [3, 2]
    assert not list(tmp_path.glob("*.partial"))


def test_a_pause_of_the_process_is_not_active_time() -> None:
    clock = Clock()
    assert [clock.active(1.0) for _ in range(6)] == [1.0] * 6
    assert clock.active(3600.0) == 4.0
    assert clock.active(1.0) == 1.0


def test_the_commands_train_export_and_measure_a_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["triforce", "demo", *arguments, "--settings", str(path)])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert not stopped.value.code
        return capsys.readouterr().out

    def small_plan(context: int) -> EvaluationPlan:
        few = {"documents": 2, "probes": 1, "questions": 1, "distractors": 1, "free_outputs": 1, "free_tokens": 24}
        return EvaluationPlan(context=context, acceptance_context=context, **few)

    path = tiny_settings(tmp_path, steps=2)
    settings = load_settings(path)
    source = "".join(f"def function_{n}(x):\n    return x + {n}\n" for n in range(400))
    names = [f"text_{n}.py" for n in range(60)]
    for name in names:
        (tmp_path / name).write_text(f"# {name}\n{source}")
    (settings.corpus_dir / "corpus.json").unlink()
    build_corpus(settings.corpus, TOKENIZER, settings.corpus_dir, [Package("a", "1", "MIT", tmp_path, tuple(names))])
    monkeypatch.setattr(EvaluationPlan, "of_context", small_plan)
    handlers: list[Any] = []
    monkeypatch.setattr(signal, "signal", lambda *given: handlers.append(given))  # SIGTERM stays what it is to pytest
    weights = str(tmp_path / "weights")
    command("train", "--threads", "1")
    assert handlers[-1] == (signal.SIGTERM, signal.SIG_DFL), "an export can be ended"
    command("export", weights)
    figures = json.loads(command("evaluate", weights, "--context", "512", "--threads", "1", "--card", "--json"))
    assert list(figures["loss_by_position"]) == ["0-512"]
    assert set(figures["acceptance"]) == {"retrieval", "draft"}
    assert figures["dtype"] == machine_dtype("cpu")
    assert figures["tokens_seen"] == 2 * 128
    assert json.loads((tmp_path / "weights" / "evaluation.json").read_text()) == figures
