"""Reports of a training run: the loss curve in a file; progress, rate and time left on the console."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from triforce_tools.demo_training.learner import Learner
from triforce_tools.demo_training.settings import Stage

_LINE_EVERY = 10  # steps between two lines where there is no terminal to draw a bar on


class Clock:
    """Measures active time. A step that took far longer than its predecessors, because the process was stopped, counts
    at most four times their median.
    """

    def __init__(self) -> None:
        self._recent: list[float] = []

    def active(self, wall_s: float) -> float:
        """Seconds to count for a step of `wall_s` seconds."""
        counted = min(wall_s, 4 * self.usual_s) if len(self._recent) >= 5 else wall_s
        self._recent = [*self._recent[-19:], counted]
        return counted

    @property
    def usual_s(self) -> float:
        """Median of the last steps."""
        return statistics.median(self._recent)


class StageReport:
    """Reports the steps of one stage; use as a context manager."""

    def __init__(self, learner: Learner, stage: Stage, curve: Path, console: Console, clock: Clock) -> None:
        self._learner, self._stage, self._console, self._clock = learner, stage, console, clock
        self._curve = curve
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            disable=not console.is_terminal,
        )
        done = learner.progress.stage_step
        self._task = self._bar.add_task(stage.name, total=stage.steps, completed=done, figures="")

    def __enter__(self) -> StageReport:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, losses: dict[str, float], factor: float) -> None:
        """Report the step just done: mean losses in nats, factor of the learning rate."""
        progress, stage = self._learner.progress, self._stage
        line = {"step": progress.step, "stage": stage.name, "tokens": progress.tokens_seen, "lr": round(factor, 4)}
        with self._curve.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, **{name: round(loss, 5) for name, loss in losses.items()}}) + "\n")
        rate = stage.rows * stage.length / self._clock.usual_s
        left_min = (stage.steps - progress.stage_step) * self._clock.usual_s / 60
        shown = "  ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
        figures = f"{shown}  {rate:,.0f} tokens/s  {left_min:.1f} min left"
        self._bar.update(self._task, completed=progress.stage_step, figures=figures)
        if self._bar.disable and progress.stage_step % _LINE_EVERY == 0:
            count = f"{progress.stage_step}/{stage.steps}"
            self._console.print(f"{stage.name} {count}  {figures}", highlight=False, soft_wrap=True)


def truncate_curve(curve: Path, step: int) -> None:
    """Remove the lines of a loss curve after `step`, because these steps will be run again."""
    if curve.is_file():
        lines = curve.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        curve.write_text("".join(kept), encoding="utf-8")
