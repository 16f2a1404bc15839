"""All settings, one model, validated where they enter. `triforce config` prints them; unknown keys are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from triforce_core.errors import InvalidValueError

TIER_SETS = {"target": (False, False), "retrieval,target": (True, False), "draft,retrieval,target": (True, True)}
TierSet = Literal["target", "retrieval,target", "draft,retrieval,target"]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DraftSettings(Strict):
    """The tiny model and its StreamingLLM cache; sizes in tokens."""

    model: str = Field("demo", description="directory, hub id, or `demo` for the embedded drafter")
    sinks: int = Field(4, ge=0)
    window: int = Field(252, ge=1)
    slack: int = Field(128, ge=1, description="how far the window may grow before it is moved")


class RetrievalSettings(Strict):
    """The self-drafter and its sparse cache; sizes in tokens."""

    model: str | None = Field(
        None,
        description="the self-drafter's weights, such as a quantised copy of the target's; by default the target's",
    )
    budget: int = Field(1024, ge=2, description="tokens of the full cache that a snapshot holds")
    chunk: int = Field(8, ge=1, description="tokens that are selected together")
    recent: int = Field(64, ge=0, description="tokens before the snapshot's position that are always in it")
    refresh_every: int = Field(64, ge=1, description="committed tokens after which a new snapshot is cut")
    selector: Literal["mean_key"] = "mean_key"

    @model_validator(mode="after")
    def _chunks(self) -> RetrievalSettings:
        if self.budget % self.chunk:
            raise ValueError(f"budget {self.budget} must be a multiple of chunk {self.chunk}")
        if self.budget < 2 * self.chunk:
            raise ValueError(f"budget {self.budget} must hold two chunks of {self.chunk} tokens")
        return self


class TargetSettings(Strict):
    """The model whose tokens are served, and its full KV cache."""

    model: str = Field("demo", description="directory, hub id, or `demo` for the embedded target")
    served_name: str | None = Field(None, description="the name that clients use; by default the last part of `model`")
    context_length: int | None = Field(
        None, ge=2, description="prompt + output tokens; by default what the model allows"
    )
    kv_pool_tokens: int | None = Field(None, ge=2, description="by default twice the context length")
    prefill_chunk: int = Field(2048, ge=16, description="most prompt tokens that one forward pass takes")


class SpeculationSettings(Strict):
    """Which tiers take part and how far they look ahead, where a request does not say."""

    tiers: TierSet = "draft,retrieval,target"
    lookaheads: tuple[int, int] = Field(
        (8, 3), description="tokens drafted by the retrieval tier, and by the draft tier"
    )
    micro_batches: int = Field(
        3,
        ge=1,
        le=64,
        description="shares of the live requests that the tiers work on at the same time, where each is on a device of"
        " its own; 1: all tiers take turns",
    )
    run_ahead: bool = Field(
        True, description="with fewer requests than micro-batches, draft on while the target verifies"
    )

    @model_validator(mode="after")
    def _bounded(self) -> SpeculationSettings:
        if not all(0 <= n <= 64 for n in self.lookaheads):
            raise ValueError(f"lookaheads {self.lookaheads} must each be between 0 and 64")
        return self

    @property
    def effective(self) -> tuple[int, int]:
        """The lookaheads with those of tiers that do not take part set to 0."""
        retrieval, draft = TIER_SETS[self.tiers]
        return self.lookaheads[0] * retrieval, self.lookaheads[1] * draft


class ThreadSettings(Strict):
    """CPU threads of a forward pass, in every tier. By default what torch sees fit, but one to decode with a tiny
    model, whose operators are so short that handing parts of them out costs more than it saves.
    """

    decode: int | None = Field(None, ge=1, description="of a pass over few tokens")
    prefill: int | None = Field(None, ge=1, description="of a pass over many")


class ServerSettings(Strict):
    """The HTTP and gRPC front, and the Ray resources of the tiers."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    grpc_port: int = Field(9000, ge=1, le=65535)
    max_queued: int = Field(64, ge=1, description="requests beyond the live ones before 429 is answered")
    request_timeout_s: float = Field(600.0, gt=0)
    tier_host: str = Field(
        "127.0.0.1", description="where tier actors serve one another; `node` is the Ray node's address"
    )
    link_timeout_s: float = Field(
        10.0, gt=0, description="a tier that does not answer work within this is taken for dead"
    )
    tier_cpus: float = Field(0.1, ge=0, description="CPUs that Ray reserves for each tier actor")
    tier_gpus: float = Field(0.0, ge=0, description="GPUs that Ray reserves for each tier actor")


class Settings(Strict):
    """Everything that shapes a pipeline and the server in front of it."""

    target: TargetSettings = TargetSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    draft: DraftSettings = DraftSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    server: ServerSettings = ServerSettings()
    threads: ThreadSettings = ThreadSettings()
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: str = "cpu"
    attention: str | None = Field(None, description="kernel by name; by default the best for the device")
    max_sequences: int = Field(8, ge=1, description="requests decoded at the same time")


def load_settings(path: Path | None = None, **overrides: Any) -> Settings:
    """Settings from a YAML file (or the defaults), with `overrides` merged in section by section.

    Raises `InvalidValueError` naming field, value and rule.
    """
    data = {} if path is None else read_mapping(path, "config")
    for section, value in overrides.items():
        given = data.get(section)
        if isinstance(value, dict) and isinstance(given, dict):
            data[section] = given | value
        elif given is None or not isinstance(value, dict):  # what is no mapping stays, for the model to refuse
            data[section] = value
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        raise invalid_value(error) from None


def read_mapping(path: Path, field: str) -> dict[str, Any]:
    """What a YAML file maps to what; an empty file maps nothing.

    Raises `InvalidValueError` naming the setting that named the file.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise InvalidValueError(field, str(path), f"cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidValueError(field, str(path), f"is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise InvalidValueError(field, str(path), "must be a mapping of sections")
    return data


def invalid_value(error: ValidationError) -> InvalidValueError:
    """The first complaint of a pydantic error as one of ours."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "settings"
    rule = first["msg"].removeprefix("Value error, ")
    return InvalidValueError(field, first["input"], f"is refused: {rule}")
