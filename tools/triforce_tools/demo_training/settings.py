"""Settings of demo training: shapes of the two models and the stages of their training, from one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from triforce_core.config import invalid_value, read_mapping
from triforce_core.errors import require

Share = Annotated[float, Field(ge=0, le=1)]
ModelName = Literal["target", "drafter"]
DEFAULT_SETTINGS = Path(__file__).with_name("train.yaml")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Stage(_Strict):
    """One stretch of training at one sequence length."""

    name: str
    length: int = Field(ge=32)
    tokens: PositiveInt
    batch_tokens: PositiveInt
    lr_start: NonNegativeFloat  # factor of the learning rate, which goes linearly to `lr_end`
    lr_end: NonNegativeFloat
    recall_share: Share = 0.0  # of sequences that hold recall tasks
    once_share: Share = 0.0  # of these, whose keys are asked for only once, so that no earlier answer can be copied
    answer_weight: PositiveFloat = 1.0  # loss weight of an answer token in these; a token of ordinary text has 1
    skip_share: Share = 0.0  # of sequences whose positions jump, so that short ones teach large distances
    source: Literal["corpus", "target"] = (
        "corpus"  # of the text; `target`, for a drafter, is text that the target wrote
    )

    @property
    def rows(self) -> int:
        """Sequences in one step."""
        return max(1, self.batch_tokens // self.length)

    @property
    def steps(self) -> int:
        return -(-self.tokens // (self.rows * self.length))


class Shape(_Strict):
    """Shape of one Llama model, in the words of its configuration; KV heads equal heads, embeddings are tied."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    head_dim: int = Field(gt=0, multiple_of=2)
    rope_theta: PositiveFloat


class ModelSettings(_Strict):
    """One model and its training."""

    shape: Shape
    stages: tuple[Stage, ...] = Field(min_length=1)

    def begun(self, step: int) -> list[tuple[Stage, int]]:
        """The stages that have begun when `step` steps are done in all, each with the number of its steps that are."""
        begun = []
        for stage in self.stages:
            if step > 0:
                begun.append((stage, min(step, stage.steps)))
                step -= stage.steps
        return begun


class DemoSettings(_Strict):
    """What decides the weights of the demo pair, given the installed packages."""

    seed: int
    cache_dir: Path
    max_positions: PositiveInt
    microbatch_tokens: PositiveInt
    checkpoint_minutes: NonNegativeFloat
    compile: bool
    models: dict[ModelName, ModelSettings]  # the drafter learns from the target

    @property
    def folder(self) -> Path:
        """Where corpus and checkpoints lie."""
        return self.cache_dir.expanduser()


def load_settings(path: Path = DEFAULT_SETTINGS) -> DemoSettings:
    """The settings in a file. Raises `InvalidValueError` naming field, value and rule."""
    try:
        settings = DemoSettings.model_validate(read_mapping(path, "settings"))
    except ValidationError as error:
        raise invalid_value(error) from None
    names = sorted(settings.models)
    require(names == ["drafter", "target"], "models", names, "must be target and drafter")
    longest = max(stage.length for model in settings.models.values() for stage in model.stages)
    require(longest <= settings.max_positions, "length", longest, f"exceeds max_positions {settings.max_positions}")
    return settings
