"""A model in training: its weights, its optimisers and its progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import LlamaForCausalLM

from triforce_tools.demo_training.modeling import build_model
from triforce_tools.demo_training.settings import DemoSettings, ModelName, OptimiserSettings, Stage


@dataclass(slots=True)
class Progress:
    """The progress of one model in training."""

    stage: str = ""
    stage_step: int = 0  # steps done in that stage
    step: int = 0  # steps done in all
    tokens_seen: int = 0
    trained_context: int = 0  # longest sequence trained on, tokens
    seconds: float = 0.0  # of active time: pauses of the process are not counted

    def enter(self, stage: Stage) -> None:
        """Begin a stage, or continue it."""
        if self.stage != stage.name:
            self.stage, self.stage_step = stage.name, 0

    def advance(self, stage: Stage, active_s: float) -> None:
        """Count one step."""
        self.stage_step += 1
        self.step += 1
        self.tokens_seen += stage.rows * stage.length
        self.trained_context = max(self.trained_context, stage.length)
        self.seconds += active_s

    def remaining(self, stages: Sequence[Stage]) -> Sequence[Stage]:
        """The stages from the current one on.

        Raises:
            KeyError: no stage has the current stage's name.
        """
        names = [stage.name for stage in stages]
        if self.stage and self.stage not in names:
            raise KeyError(self.stage)
        return stages[names.index(self.stage) if self.stage else 0 :]


@dataclass(slots=True)
class Learner:
    """A model with its optimisers."""

    name: ModelName
    model: LlamaForCausalLM
    optimisers: tuple[torch.optim.Optimizer, ...]
    progress: Progress = field(default_factory=Progress)

    @classmethod
    def fresh(cls, name: ModelName, settings: DemoSettings, device: torch.device) -> Learner:
        model = build_model(settings.geometry(name), max_positions=settings.max_positions, seed=settings.seed)
        model.to(device)  # type: ignore[arg-type]
        return cls(name, model, _optimisers(model, settings.optimiser))

    def state(self) -> dict[str, Any]:
        """The learner's state for a checkpoint."""
        return {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "progress": asdict(self.progress),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.progress = Progress(**state["progress"])

    def set_learning_rate(self, stage: Stage, warmup_steps: int) -> float:
        """Set the learning rates of the next step; returns their factor."""
        share = self.progress.stage_step / max(1, stage.steps - 1)
        factor = stage.lr_start + (stage.lr_end - stage.lr_start) * share
        factor *= min(1.0, (self.progress.step + 1) / max(1, warmup_steps))
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = optimiser.defaults["lr"] * factor
        return factor

    def update(self, max_grad_norm: float) -> None:
        """Make one optimiser step with the accumulated gradients, and clear them."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_grad_norm)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)


def _optimisers(model: LlamaForCausalLM, settings: OptimiserSettings) -> tuple[torch.optim.Optimizer, ...]:
    """Muon (Jordan et al. 2024) for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers." in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers." in name)]
    return (
        torch.optim.Muon(matrices, lr=settings.muon_lr, weight_decay=settings.weight_decay, momentum=0.95),
        torch.optim.AdamW(others, lr=settings.adam_lr, weight_decay=0.0, betas=(0.9, 0.95)),
    )
