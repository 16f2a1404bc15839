"""The trainer of the demo pair: stages one after the other, resumable at every checkpoint, on a CPU or a GPU.

The target learns from text and recall tasks at rising sequence lengths; then the drafter learns the target's
distributions. Steps share no random state, so a resumed run gives the same weights as one without a break.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import time
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM

from triforce_core.errors import require
from triforce_core.machine.device import torch_device
from triforce_tools.demo_training.batches import Batch, make_batch
from triforce_tools.demo_training.corpus import Corpus, build_corpus, demo_tokenizer
from triforce_tools.demo_training.models import build_model, losses, written_by_target
from triforce_tools.demo_training.recall import RecallTasks
from triforce_tools.demo_training.settings import DemoSettings, ModelName, Stage

_WARMUP_STEPS = 100


def train(
    settings: DemoSettings,
    *,
    resume: bool = False,
    minutes: float | None = None,
    device: str = "cpu",
    threads: int | None = None,
) -> bool:
    """Train the pair until all stages are done or `minutes` have passed; returns whether all are done.

    Raises:
        InvalidValueError: the device does not exist; `threads` is less than 1; there are checkpoints already and
            `resume` is not set; or it is set, and they have another corpus, shape, seed or other stages.
    """
    until = math.inf if minutes is None else time.monotonic() + 60 * minutes
    where = torch_device(device)
    if threads is not None:
        require(threads >= 1, "threads", threads, "must be at least 1")
        torch.set_num_threads(threads)
    if where.type == "cpu" and sys.platform == "linux":
        # Have glibc reuse large allocations: on a small CPU, fresh pages for each activation cost more than the
        # arithmetic. The options are M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h.
        for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 2**26)):
            ctypes.CDLL(None).mallopt(option, value)
    tasks = RecallTasks(demo_tokenizer())
    fresh = not any(settings.folder.glob("*.ckpt"))
    require(fresh or resume, "cache_dir", str(settings.folder), "holds a run already: resume it or delete it")
    corpus = build_corpus(settings.folder)
    print(f"corpus: {len(corpus.tokens):,} tokens of {len(corpus.packages)} packages", flush=True)
    target = Learner("target", settings, corpus, tasks, where)
    done = target.train(until, teacher=None)
    if done:
        target.model.eval().requires_grad_(False)
        done = Learner("drafter", settings, corpus, tasks, where).train(until, teacher=target)
    if not done:
        print("stopped; go on with --resume", flush=True)
    return done


def load_checkpoint(settings: DemoSettings, name: ModelName) -> dict[str, Any]:
    """The latest state of a model, on the CPU. Raises `InvalidValueError` if there is none."""
    path = settings.folder / f"{name}.ckpt"
    require(path.is_file(), "cache_dir", str(settings.folder), f"holds no checkpoint of the {name}")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


class Learner:
    """A model in training; it goes on from its checkpoint if there is one."""

    def __init__(
        self, name: ModelName, settings: DemoSettings, corpus: Corpus, tasks: RecallTasks, device: torch.device
    ) -> None:
        self.name, self.settings, self.corpus, self.tasks, self.device = name, settings, corpus, tasks, device
        shape = settings.models[name].shape
        self.model = build_model(shape, max_positions=settings.max_positions, seed=settings.seed)
        self.model.to(device)  # type: ignore[arg-type]
        self.optimisers = _optimisers(self.model)
        self.step = 0  # steps done in all stages
        self.seconds = 0.0  # that they took
        if (settings.folder / f"{name}.ckpt").is_file():
            self._load(load_checkpoint(settings, name))

    def _load(self, state: dict[str, Any]) -> None:
        self.step, self.seconds = state["step"], state["seconds"]
        for field, value in self._run().items():
            require(value == state["run"][field], field, value, f"is not that of the {self.name} in the cache folder")
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)

    def _run(self) -> dict[str, Any]:
        """What must be the same when the run is resumed."""
        settings = self.settings.models[self.name]
        stages = [stage.model_dump() for stage, _ in settings.begun(self.step)]
        corpus, seed = self.corpus.digest, self.settings.seed
        return {"corpus": corpus, "seed": seed, "shape": settings.shape.model_dump(), "stages": stages}

    def _save(self) -> None:
        """Write the checkpoint so that it is whole if the process is killed at any moment."""
        state = {"step": self.step, "seconds": self.seconds, "run": self._run(), "model": self.model.state_dict()}
        state["optimisers"] = [optimiser.state_dict() for optimiser in self.optimisers]
        path = self.settings.folder / f"{self.name}.ckpt"
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def train(self, until: float, *, teacher: Learner | None) -> bool:
        """Train all stages, with a teacher on its distributions. Returns whether they ended before `until`, a time of
        the monotonic clock.
        """
        torch.compiler.reset()  # shapes that an earlier model compiled would count towards the limit of this one's
        losses_of = partial(losses, self.model, None if teacher is None else teacher.model)
        self.losses_of = torch.compile(losses_of, dynamic=False, disable=not self.settings.compile)
        first = 0  # the step at which the stage begins
        for stage in self.settings.models[self.name].stages:
            if self.step < first + stage.steps and not self._train_stage(stage, first, until, teacher):
                return False
            first += stage.steps
        return True

    def _train_stage(self, stage: Stage, first: int, until: float, teacher: Learner | None) -> bool:
        tokens, settings = self.corpus.tokens, self.settings
        if stage.source == "target" and teacher is not None:
            path = settings.folder / f"{stage.name}-{teacher.step:08d}.bin"
            print(f"{path}: the target is writing", flush=True)
            num_tokens = stage.tokens + 2 * stage.length
            tokens = written_by_target(teacher.model, tokens, path, num_tokens=num_tokens, seed=settings.seed)

        saved = time.monotonic()
        for step in range(self.step - first, stage.steps):
            begin = time.monotonic()
            self._set_learning_rate(stage, step)
            loss = self._make_step(make_batch(settings, stage, tokens, self.tasks, step))
            now = time.monotonic()
            self.seconds += now - begin
            if self.step % 10 == 0:
                minutes_left = (stage.steps - step - 1) * (now - begin) / 60
                print(f"{stage.name} {step + 1}/{stage.steps} loss {loss:.3f}, {minutes_left:.1f} min left", flush=True)
            if step + 1 == stage.steps or now >= min(until, saved + 60 * settings.checkpoint_minutes):
                self._save()
                saved = now
            if now >= until:
                return False
        return True

    def _make_step(self, batch: Batch) -> float:
        """One step of the optimisers; returns the mean loss, nats."""
        loss = 0.0
        size = max(1, self.settings.microbatch_tokens // batch.ids.shape[1])
        for parts in zip(*(column.split(size) for column in batch), strict=True):
            ids, labels, positions, weights = (part.to(self.device) for part in parts)
            with torch.autocast(self.device.type, torch.bfloat16):
                each = self.losses_of(ids, positions, labels)
            mean = (each * weights).sum() / float(batch.weights.sum())
            mean.backward()
            loss += float(mean.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return loss

    def _set_learning_rate(self, stage: Stage, step: int) -> None:
        """Set the learning rates of a step, counted from the stage's start."""
        factor = stage.lr_start + (stage.lr_end - stage.lr_start) * (step / max(1, stage.steps - 1))
        factor *= min(1.0, (self.step + 1) / _WARMUP_STEPS)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = optimiser.defaults["lr"] * factor


def _optimisers(model: LlamaForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    """Muon (Jordan et al. 2024) for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers." in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers." in name)]
    return (
        torch.optim.Muon(matrices, lr=0.015, weight_decay=0.02, momentum=0.95),
        torch.optim.AdamW(others, lr=0.002, weight_decay=0.0, betas=(0.9, 0.95)),
    )
