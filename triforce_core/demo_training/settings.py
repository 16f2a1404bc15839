"""Settings of the demo pair: one file (`train.yaml`) says everything that shapes the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from triforce_core.config import invalid_value, read_mapping

ModelName = Literal["target", "drafter"]
MODELS: tuple[ModelName, ...] = ("target", "drafter")  # in the order in which they are trained
DEFAULT_SETTINGS = Path(__file__).with_name("train.yaml")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Geometry(_Strict):
    """Shape of one Llama model; KV heads equal heads, embeddings are tied."""

    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    layers: int = Field(gt=0)
    heads: int = Field(gt=0)
    head_dim: int = Field(gt=0, multiple_of=2)
    rope_theta: float = Field(gt=0)


class CorpusSettings(_Strict):
    """Which installed files are read, and which of them are held out."""

    suffixes: tuple[str, ...]
    skipped_folders: tuple[str, ...]
    """Files below a folder of such a name are left out: tests, copies of other projects."""
    max_file_bytes: int = Field(gt=0)
    copies: dict[str, int]
    """How often a package is read in one epoch, where that is not once."""
    held_out_percent: int = Field(ge=0, le=50)
    held_out_stdlib: tuple[str, ...]


class RecallSettings(_Strict):
    """Synthetic recall tasks: keys defined early, asked for later."""

    dense_share: float = Field(ge=0, le=1)
    """Share of recall sequences without filler text between the snippets."""
    tokens_per_snippet: int = Field(ge=16)
    """Mean tokens between two snippets in filler text."""
    max_keys: int = Field(gt=0)


class OptimiserSettings(_Strict):
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""

    muon_lr: float = Field(gt=0)
    adam_lr: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    warmup_steps: int = Field(ge=0)
    max_grad_norm: float = Field(gt=0)


class Stage(_Strict):
    """One stretch of training at one sequence length; the learning rate goes linearly from start to end."""

    name: str
    model: ModelName
    length: int = Field(ge=32)
    tokens: int = Field(gt=0)
    batch_tokens: int = Field(gt=0)
    lr_start: float = Field(ge=0)
    lr_end: float = Field(ge=0)
    recall_share: float = Field(ge=0, le=1)
    """Share of sequences that hold recall tasks."""
    once_share: float = Field(0.0, ge=0, le=1)
    """Share of these whose keys are asked for only once, so that no answer stands nearer by than its definition."""
    answer_weight: float = Field(gt=0)
    """Weight of one answer token of theirs in the loss; a token of ordinary text has 1."""
    source: Literal["corpus", "target"] = "corpus"
    """Where the text comes from; the target's own is for a drafter."""
    skip_share: float = Field(ge=0, le=1)
    """Share of sequences whose position ids jump, so that short sequences show far positions (Zhu et al. 2023)."""

    @property
    def rows(self) -> int:
        """Sequences in one step."""
        return max(1, self.batch_tokens // self.length)

    @property
    def steps(self) -> int:
        return -(-self.tokens // (self.rows * self.length))


class DemoSettings(_Strict):
    """Everything that decides the weights of the demo pair, given the installed packages."""

    seed: int
    cache_dir: Path
    tokenizer: Path
    max_positions: int = Field(gt=0)
    microbatch_tokens: int = Field(gt=0)
    checkpoint_minutes: float = Field(ge=0)
    compile: bool
    target: Geometry
    drafter: Geometry
    corpus: CorpusSettings
    recall: RecallSettings
    optimiser: OptimiserSettings
    stages: tuple[Stage, ...]

    @model_validator(mode="after")
    def _stages_fit(self) -> DemoSettings:
        names = [stage.name for stage in self.stages]
        if len(set(names)) != len(names):
            raise ValueError(f"stages: names must differ, got {names}")
        for stage in self.stages:
            if stage.length > self.max_positions:
                raise ValueError(
                    f"stages: {stage.name}.length {stage.length} exceeds max_positions {self.max_positions}"
                )
        return self

    @property
    def run_dir(self) -> Path:
        """Where checkpoints and the loss curve live."""
        return self.cache_dir.expanduser() / "run"

    @property
    def corpus_dir(self) -> Path:
        """Where the tokenised corpus lives."""
        return self.cache_dir.expanduser() / "corpus"

    def geometry(self, model: ModelName) -> Geometry:
        return self.target if model == "target" else self.drafter


def load_settings(
    path: Path = DEFAULT_SETTINGS, *, cache_dir: Path | None = None, tokenizer: Path | None = None
) -> DemoSettings:
    """Settings of a file, the caller's word before the file's; the tokenizer in it is relative to the file.

    Raises `InvalidValueError` naming field, value and rule.
    """
    values = read_mapping(path, "settings")
    named = tokenizer or values.get("tokenizer")
    if isinstance(named, str):
        named = (path.parent / named).resolve()
    values |= {"tokenizer": named} | ({} if cache_dir is None else {"cache_dir": cache_dir})
    try:
        return DemoSettings.model_validate(values)
    except ValidationError as error:
        raise invalid_value(error) from None
