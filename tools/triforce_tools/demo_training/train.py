"""The trainer of the demo pair: stages one after the other, resumable at every checkpoint, on a CPU or a GPU.

The target learns from text and recall tasks at rising sequence lengths; then the drafter learns the target's
distributions. Steps share no random state, so a resumed run gives the same loss curve as one without a break.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaForCausalLM

from triforce_core.errors import TriForceError, require
from triforce_core.models.device import torch_device
from triforce_tools.demo_training.batches import Batch, BatchSource
from triforce_tools.demo_training.checkpoint import latest_checkpoint, save_checkpoint
from triforce_tools.demo_training.corpus import Corpus, Tokens, build_corpus
from triforce_tools.demo_training.generations import written_by_target
from triforce_tools.demo_training.learner import Learner
from triforce_tools.demo_training.modeling import build_model, distillation_losses, logits, token_losses
from triforce_tools.demo_training.recall import RecallTasks
from triforce_tools.demo_training.report import Clock, StageReport, truncate_curve
from triforce_tools.demo_training.settings import MODELS, DemoSettings, ModelName, Stage

Losses = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(ids, positions, labels), each [rows, length] → loss of each label, [rows, length] float32."""


class CannotResumeError(TriForceError):
    """The run folder cannot be used or continued with these settings."""


def train(
    settings: DemoSettings,
    *,
    resume: bool = False,
    minutes: float | None = None,
    device: str = "cpu",
    threads: int | None = None,
    console: Console | None = None,
    stop: threading.Event | None = None,
) -> bool:
    """Train the pair until all stages are done, `minutes` of active time have passed, or `stop` is set.

    Returns whether all stages are done. Checkpoints, one of them after the last step, and loss curves are written to
    `settings.run_dir`.

    Raises:
        CannotResumeError: with `resume`, the checkpoints have another corpus, geometry or stage, or all are damaged;
            without `resume`, there are checkpoints already.
        InvalidValueError: the device does not exist, or `threads` is less than 1.
    """
    console, where = console or Console(), torch_device(device)
    if threads is not None:
        require(threads >= 1, "threads", threads, "must be at least 1")
        torch.set_num_threads(threads)
    if where.type == "cpu":
        _keep_freed_memory()
    if not resume and any(settings.run_dir.glob("*.ckpt")):
        raise CannotResumeError(f"{settings.run_dir}: a run lies here already; resume it or delete it")
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    corpus = build_corpus(settings.corpus, settings.tokenizer, settings.corpus_dir)
    console.print(f"corpus: {len(corpus.train):,} tokens of {len(corpus.packages)} packages, {corpus.digest[:12]}")
    budget_s = float("inf") if minutes is None else 60 * minutes
    run = _Run(settings, corpus, where, console, budget_s, stop or threading.Event())
    done = run.all_stages()
    if not done:
        console.print("stopped; go on with --resume")
    return done


class _Run:
    """One process's work on the stages."""

    def __init__(
        self,
        settings: DemoSettings,
        corpus: Corpus,
        device: torch.device,
        console: Console,
        budget_s: float,
        stop: threading.Event,
    ) -> None:
        self._settings, self._corpus, self._device, self._console = settings, corpus, device, console
        self._budget_s, self._stop = budget_s, stop
        self._tasks = RecallTasks.from_file(settings.tokenizer)
        self._clock = Clock()

    def all_stages(self) -> bool:
        """Train all stages; returns whether all are done."""
        for name in MODELS:
            stages = [stage for stage in self._settings.stages if stage.model == name]
            if not stages:
                continue
            learner = self._learner(name)
            try:
                remaining = learner.progress.remaining(stages)
            except KeyError as stage:
                raise CannotResumeError(f"{self._settings.run_dir}: the settings name no stage {stage}") from None
            if not all(self._stage(learner, stage) for stage in remaining):
                return False
        return True

    def _learner(self, name: ModelName) -> Learner:
        """The learner of a model, from its newest whole checkpoint or else fresh."""
        learner = Learner.fresh(name, self._settings, self._device)
        state = self._checkpoint(name)
        if state is not None:
            learner.load(state)
        truncate_curve(self._curve(name), learner.progress.step)
        millions = sum(parameter.numel() for parameter in learner.model.parameters()) / 1e6
        self._console.print(f"{name}: {millions:.1f}M parameters, at step {learner.progress.step}")
        return learner

    def _checkpoint(self, name: ModelName) -> dict[str, Any] | None:
        folder = self._settings.run_dir
        refused: list[Path] = []
        state = latest_checkpoint(folder, name, refused=refused)
        for path in refused:
            self._console.print(f"[yellow]{path}: damaged, refused", soft_wrap=True)
        if state is None and refused:
            raise CannotResumeError(f"{folder}: every checkpoint of the {name} is damaged")
        if state is not None and state["corpus"] != self._corpus.digest:
            raise CannotResumeError(f"{folder}: the {name} was trained on another corpus, {state['corpus'][:12]}")
        if state is not None and state["geometry"] != self._settings.geometry(name).model_dump():
            raise CannotResumeError(f"{folder}: the {name} has another geometry, {state['geometry']}")
        return state

    def _save(self, learner: Learner) -> None:
        about = {
            "geometry": self._settings.geometry(learner.name).model_dump(),
            "corpus": self._corpus.digest,
        }
        save_checkpoint(self._settings.run_dir, learner.name, learner.progress.step, {**learner.state(), **about})

    def _stage(self, learner: Learner, stage: Stage) -> bool:
        """Train to the stage's end; returns False if stopped before."""
        progress = learner.progress
        progress.enter(stage)
        if progress.stage_step >= stage.steps:
            return True
        text = self._text(stage)
        if text is None:
            return False
        source = BatchSource(self._settings, stage, text, self._tasks)
        losses_of = self._losses(learner)
        saved_s = progress.seconds
        with StageReport(learner, stage, self._curve(learner.name), self._console, self._clock) as report:
            while progress.stage_step < stage.steps:
                begin = time.perf_counter()
                factor = learner.set_learning_rate(stage, self._settings.optimiser.warmup_steps)
                losses = self._step(learner, losses_of, source.batch(progress.stage_step))
                active_s = self._clock.active(time.perf_counter() - begin)
                progress.advance(stage, active_s)
                report.step(losses, factor)
                self._budget_s -= active_s
                halt = self._stop.is_set() or self._budget_s <= 0
                due = progress.seconds - saved_s >= 60 * self._settings.checkpoint_minutes
                if due or halt or progress.stage_step == stage.steps:
                    self._save(learner)
                    saved_s = progress.seconds
                if halt:
                    return False
        return True

    def _text(self, stage: Stage) -> Tokens | None:
        """The text of a stage; None if stopped while the target was generating it."""
        if stage.source == "corpus":
            return self._corpus.train
        teacher, step = self._teacher()
        path = self._settings.run_dir / f"{stage.name}-{step:08d}.bin"
        self._console.print(f"{path}: the target is writing", soft_wrap=True)
        num_tokens, seed = stage.tokens + 2 * stage.length, self._settings.seed
        return written_by_target(
            teacher, self._corpus.train, path, num_tokens=num_tokens, seed=seed, halt=self._stop.is_set
        )

    def _step(self, learner: Learner, losses_of: Losses, batch: Batch) -> dict[str, float]:
        """One optimiser step; returns the mean losses of text and of recall answers, nats."""
        total = float(batch.weights.sum())
        is_text = (batch.weights == 1) & ~batch.is_answer
        losses = []
        for part in _microbatches(batch, self._settings.microbatch_tokens):
            ids, positions, labels, weights = (
                tensor.to(self._device) for tensor in (part.ids, part.positions, part.labels, part.weights)
            )
            with torch.autocast(self._device.type, torch.bfloat16):
                each = losses_of(ids, positions, labels)
            ((each * weights).sum() / total).backward()
            losses.append(each.detach())
        learner.update(self._settings.optimiser.max_grad_norm)
        every = torch.cat(losses).cpu()
        chosen = {"text": every[is_text], "answer": every[batch.is_answer]}
        return {name: float(part.mean()) for name, part in chosen.items() if len(part)}

    def _losses(self, learner: Learner) -> Losses:
        """The loss function: cross entropy for the target; for the drafter, the KL divergence from the target's
        distributions.
        """
        model = learner.model
        if learner.name == "target":
            return self._compiled(lambda ids, positions, labels: token_losses(model, ids, positions, labels))
        teacher, _ = self._teacher()
        teach = self._compiled(lambda ids, positions: logits(teacher, ids, positions))
        learn = self._compiled(lambda ids, positions, scores: distillation_losses(model, ids, positions, scores))

        def distil(ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                scores = teach(ids, positions)
            return learn(ids, positions, scores)

        return distil

    def _compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.compile(function, dynamic=False) if self._settings.compile else function

    def _teacher(self) -> tuple[LlamaForCausalLM, int]:
        """The target from its newest checkpoint, and the step of that checkpoint."""
        state = self._checkpoint("target")
        if state is None:
            raise CannotResumeError(f"{self._settings.run_dir}: there is no target yet to distil from")
        settings = self._settings
        model = build_model(settings.target, max_positions=settings.max_positions, seed=settings.seed)
        model.load_state_dict(state["model"])
        model.to(self._device)  # type: ignore[arg-type]
        model.eval().requires_grad_(False)
        return model, state["progress"]["step"]

    def _curve(self, name: ModelName) -> Path:
        return self._settings.run_dir / f"{name}.jsonl"


def _microbatches(batch: Batch, tokens: int) -> Iterator[Batch]:
    """The batch in pieces of at most `tokens` tokens, at least one row each."""
    rows, length = batch.ids.shape
    size = max(1, tokens // length)
    columns = (batch.ids, batch.labels, batch.positions, batch.weights, batch.is_answer)
    for first in range(0, rows, size):
        yield Batch(*(column[first : first + size] for column in columns))


def _keep_freed_memory() -> None:
    """Have glibc reuse large allocations: on a small CPU, fresh pages for each activation cost more than the
    arithmetic.
    """
    if sys.platform == "linux":
        mallopt = ctypes.CDLL(None).mallopt
        mmap_max, trim_threshold, top_pad = -4, -1, -2  # constants of malloc.h
        for option, value in ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 2**26)):
            mallopt(option, value)
