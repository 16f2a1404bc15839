"""All settings, one model, validated where they enter. `triforce config` prints them; unknown keys are refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from triforce_core.errors import InvalidValueError

TIER_SETS = {"target": (False, False), "retrieval,target": (True, False), "draft,retrieval,target": (True, True)}
TierSet = Literal["target", "retrieval,target", "draft,retrieval,target"]
# Which tiers are one process; the target's first, and in each the uppermost tier first.
COLOCATED = {
    "none": (("target",), ("retrieval",), ("draft",)),
    "draft_with_retrieval": (("target",), ("retrieval", "draft")),
    "all": (("target", "retrieval", "draft"),),
}
MAX_LOOKAHEAD = 64  # tokens that a tier may be asked to draft at once; caches and passes have room for blocks of these
DEVICE = re.compile(r"cpu|cuda(:\d+)?")
# With KV off the device its transfer is what costs: in few passes over a prompt, in long blocks, there is less of it.
OFFLOADED_PREFILL_CHUNK = 32_768
OFFLOADED_LOOKAHEADS = (16, 3)
LABEL_SELECTOR = re.compile(r"!?(in\([\w.-]+(, ?[\w.-]+)*\)|[\w.-]+)")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DraftSettings(Strict):
    """The tiny model and its StreamingLLM cache, or prompt lookup in place of both; sizes in tokens."""

    model: str = Field(  # whatever is no name in `engine.drafters.DRAFTERS` is a model's
        "demo", description="directory, hub id, `demo` for the embedded drafter, or `ngram` for prompt lookup"
    )
    window: int = Field(
        252, ge=1, description="the last tokens that a model sees; smaller for a drafter of short context or memory"
    )

    @property
    def slack(self) -> int:
        """How far the window may grow before it is moved: half of what is kept, so that the pass that moves it, over
        the whole window, comes rarely and the cache stays small.
        """
        return (self.window + 4) // 2


class RetrievalSettings(Strict):
    """The self-drafter and its sparse cache; sizes in tokens."""

    model: str | None = Field(
        None, description="other weights for the retrieval tier, such as a distilled target; by default the target's"
    )
    quantization: Literal["int8", "int4", "fp8"] | None = Field(
        None,
        description="a copy of the weights in fewer bits, for faster steps or a smaller GPU; never the target's",
    )
    tensor_parallel: int | None = Field(
        None, ge=1, description="GPUs of the retrieval tier, where it needs fewer than the target; by default as many"
    )
    budget: int = Field(
        1024,
        ge=2,
        description="tokens of the full cache that a snapshot holds: more are accepted more, and cost more a step",
    )
    chunk: int = Field(
        8, ge=1, description="tokens that are selected together: small chunks choose better, and are more to rank"
    )
    refresh_every: int = Field(
        64, ge=1, description="tokens after which a new snapshot is cut: fewer keep it fresh, and are more to hand over"
    )
    selector: Literal["mean_key"] = Field("mean_key", description="how chunks are ranked; see kv/selectors.py")
    transport: Literal["object_store", "rdt"] = Field(
        "object_store",
        description="what carries snapshots between tier actors: Ray's object store, or Ray Direct Transport from GPU"
        " to GPU, which needs NIXL installed",
    )

    @property
    def recent(self) -> int:
        """Tokens before the snapshot's position that are always in it: eight default chunks, as long as most of a small
        budget is left for chunks that are chosen.
        """
        return min(64, self.budget // 4)

    @property
    def own_weights(self) -> bool:
        """Whether the retrieval tier's weights are other than the target's."""
        return self.model is not None or self.quantization is not None

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
    tensor_parallel: int = Field(
        1, ge=1, description="GPUs that the weights and KV heads are divided over, for models that one GPU cannot hold"
    )
    context_length: int | None = Field(
        None, ge=2, description="most tokens of prompt and output, to fit less memory; by default what the model allows"
    )
    kv_pool_tokens: int | None = Field(
        None,
        ge=2,
        description="tokens of KV for all requests together: more run at once; by default twice the context length,"
        " once under offload",
    )
    offload: Literal["none", "host", "disk"] = Field(
        "none", description="where KV lies that does not stay on the device: in host memory, or in a file"
    )
    resident_layers: int = Field(
        0, ge=0, description="the first layers, whose KV stays on the device under offload: as many as fit"
    )
    offload_path: str | None = Field(None, description="the directory of the file, where offload is disk")
    prefill_chunk: int = Field(
        default_factory=lambda given: 2048 if given.get("offload") == "none" else OFFLOADED_PREFILL_CHUNK,
        ge=16,
        description="most prompt tokens of one forward pass: fewer hold up other requests less; by default 2048,"
        f" {OFFLOADED_PREFILL_CHUNK} under offload",
    )

    @model_validator(mode="after")
    def _offloading(self) -> TargetSettings:
        if self.resident_layers and self.offload == "none":
            raise ValueError(f"resident_layers {self.resident_layers} must be 0 where offload is none: all layers stay")
        if self.offload == "disk" and not self.offload_path:
            raise ValueError("offload_path must name a directory where offload is disk")
        if self.offload != "disk" and self.offload_path is not None:
            raise ValueError(f"offload_path {self.offload_path!r} must be null where offload is {self.offload}")
        return self


class SpeculationSettings(Strict):
    """Which tiers take part and how far they look ahead, where a request does not say."""

    tiers: TierSet = Field(
        "draft,retrieval,target", description="fewer where drafting costs more than it brings; target: plain decoding"
    )
    lookaheads: tuple[int, int] = Field(
        (8, 3),
        description="tokens drafted by the retrieval tier, and by the draft tier: more where acceptance is high; by"
        f" default (8, 3), {OFFLOADED_LOOKAHEADS} where the target's KV is offloaded",
    )
    micro_batches: int | None = Field(
        None,
        ge=1,
        le=64,
        description="shares of the live requests that the tiers work on at the same time; 1: all tiers take turns; by"
        " default one for each process that `placement.colocate` leaves",
    )
    run_ahead: bool = Field(
        True, description="with fewer requests than micro-batches, draft on while the target verifies; off to compare"
    )

    @model_validator(mode="after")
    def _bounded(self) -> SpeculationSettings:
        if not all(0 <= n <= MAX_LOOKAHEAD for n in self.lookaheads):
            raise ValueError(f"lookaheads {self.lookaheads} must each be between 0 and {MAX_LOOKAHEAD}")
        return self

    @property
    def effective(self) -> tuple[int, int]:
        """The lookaheads with those of tiers that do not take part set to 0."""
        retrieval, draft = TIER_SETS[self.tiers]
        return self.lookaheads[0] * retrieval, self.lookaheads[1] * draft


class TierPlacement(Strict):
    """What Ray reserves for a tier, and where."""

    gpus: float = Field(
        0.0, ge=0, description="GPUs that Ray reserves: whole ones, or a share of one that others may use beside it"
    )
    labels: dict[str, str] = Field(
        {},
        description="Ray labels that the node must have, such as {ray.io/accelerator-type: H100}; also !v and in(v,w)",
    )
    cores: tuple[int, ...] | None = Field(
        None,
        min_length=1,
        description="the node's CPU cores that the tier keeps to, apart from other tiers; by default all",
    )

    @model_validator(mode="after")
    def _sound(self) -> TierPlacement:
        for key, value in self.labels.items():
            if not LABEL_SELECTOR.fullmatch(value):
                raise ValueError(f"label {key} must be v, !v, in(v,w) or !in(v,w), and {value!r} is none of them")
        if self.cores is not None and (min(self.cores) < 0 or len(set(self.cores)) < len(self.cores)):
            raise ValueError(f"cores {list(self.cores)} must be different numbers from 0 on")
        return self


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Tiers that share a process and its device (of each rank, with tensor parallelism); it reserves the sum of theirs."""

    tiers: tuple[str, ...]  # names, the uppermost first
    cpus: float
    gpus: float
    labels: dict[str, str]
    cores: tuple[int, ...] | None  # None: all

    @property
    def name(self) -> str:
        return " + ".join(self.tiers)


class PlacementSettings(Strict):
    """Where the tiers of a pipeline run. Tiers that are co-located are one process on one device."""

    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK", description="whether the processes share nodes, in Ray's words"
    )
    colocate: Literal["none", "draft_with_retrieval", "all"] = Field(
        "none",
        description="which tiers share a process and its device, to use fewer GPUs; `all` shares the weights, too",
    )
    cpu_latency_us: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="microseconds that cores of the tiers' nodes may take to wake, 0: never asleep; less latency"
        " between tiers for more power; by default any",
    )
    cpus: float = Field(
        0.1, ge=0, description="CPUs that Ray reserves for each tier (and rank), to keep its other work off the node"
    )
    draft: TierPlacement = TierPlacement()
    retrieval: TierPlacement = TierPlacement()
    target: TierPlacement = TierPlacement()

    @property
    def groups(self) -> tuple[DeviceGroup, ...]:
        """The processes, the one with the target first."""
        return tuple(self._group(tiers) for tiers in COLOCATED[self.colocate])

    def _group(self, tiers: tuple[str, ...]) -> DeviceGroup:
        members: list[TierPlacement] = [getattr(self, tier) for tier in tiers]
        cores = sorted({core for m in members for core in m.cores or ()})
        return DeviceGroup(
            tiers,
            cpus=round(self.cpus * len(members), 4),  # Ray counts in ten-thousandths
            gpus=round(sum(m.gpus for m in members), 4),
            labels={key: value for m in members for key, value in m.labels.items()},
            cores=tuple(cores) or None,
        )

    @model_validator(mode="after")
    def _fit(self) -> PlacementSettings:
        for group in self.groups:
            gpus = " + ".join(f"{tier}.gpus {getattr(self, tier).gpus:g}" for tier in group.tiers)
            if group.gpus > 1 and len(group.tiers) > 1:
                raise ValueError(f"{gpus} must be at most 1: co-located tiers share one GPU")
            if group.gpus > 1 and group.gpus % 1:
                raise ValueError(f"{gpus} must be a whole number, or at most 1")
            for key, value in group.labels.items():
                for tier in group.tiers:
                    if getattr(self, tier).labels.get(key, value) != value:
                        raise ValueError(f"labels of {group.name} must agree on {key}: they share a node")
        return self


class ReplicaSettings(Strict):
    """How many copies of the whole pipeline there are; Ray Serve adds and removes them with the load."""

    min: int = Field(1, ge=1, description="copies that are there at any load")
    max: int = Field(1, ge=1, description="copies that the load may bring it to; each needs GPUs of its own")
    downscale_delay_s: float = Field(
        600.0, ge=0, description="seconds without need of a replica before it is removed; shorter frees GPUs sooner"
    )

    @model_validator(mode="after")
    def _ordered(self) -> ReplicaSettings:
        if self.min > self.max:
            raise ValueError(f"min {self.min} must be at most max {self.max}")
        return self


class ServerSettings(Strict):
    """The HTTP and gRPC front, and how many pipelines stand behind it."""

    host: str = Field("127.0.0.1", description="address to listen at; 0.0.0.0 is open to other machines")
    port: int = Field(8000, ge=1, le=65535, description="of HTTP")
    grpc_port: int = Field(9000, ge=1, le=65535, description="of the gRPC API")
    max_queued: int = Field(64, ge=1, description="requests that may wait before 429 is answered")
    request_timeout_s: float = Field(600.0, gt=0, description="longest that a request may take, waiting included")
    drain_timeout_s: float | None = Field(
        None,
        ge=0,
        description="how long requests in flight may take to finish, in seconds, when a replica or the server stops; by default"
        " request_timeout_s",
    )
    tier_host: str | None = Field(
        None,
        description="the address at which tier actors serve one another, or `node` for that of each one's Ray node; by"
        " default the loopback where all of the pipeline's processes are on one node, else each node's own",
    )
    link_timeout_s: float = Field(
        10.0,
        gt=0,
        description="seconds within which a tier must answer, or it counts as dead; the draft tier has half of it. Set it above"
        " twice the longest pass of a tier",
    )
    replicas: ReplicaSettings = ReplicaSettings()

    @property
    def drain_s(self) -> float:
        return self.request_timeout_s if self.drain_timeout_s is None else self.drain_timeout_s


class Settings(Strict):
    """Everything that shapes a pipeline and the server in front of it."""

    target: TargetSettings = TargetSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    draft: DraftSettings = DraftSettings()
    speculation: SpeculationSettings = Field(SpeculationSettings(), validate_default=True)
    placement: PlacementSettings = PlacementSettings()
    server: ServerSettings = ServerSettings()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="of weights, KV and arithmetic; auto is bfloat16 on CUDA and on CPUs with instructions for it,"
        " else float32, and the same for all replicas: what every node computes well with that may hold a target",
    )
    device: str = Field("cpu", description="cpu, cuda or cuda:N")
    attention: str | None = Field(
        None,
        description="kernel by name, such as blocked for heads of odd sizes; by default the best for device and dtype",
    )
    graphs: Literal["auto", "on", "eager", "off"] = Field(
        "auto",
        description="passes over few tokens: on captures them as CUDA graphs, eager"
        " runs the same code without capture, off runs them as all others; auto is on for CUDA and off for the CPU",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="norms, rotary embeddings and activations as fused kernels, which torch.compile makes at start;"
        " auto is on for CUDA, where a compiler works, and off for the CPU; models on several ranks stay as they are",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of every forward pass, where other programs need the cores; by default all cores for"
        " prompts, and for decoding what is measured at start, tier by tier, and kept",
    )
    max_sequences: int = Field(
        8, ge=1, description="requests that a pipeline decodes at the same time: more need more KV"
    )

    @field_validator("speculation")
    @classmethod
    def _further_where_offloaded(cls, given: SpeculationSettings, others: ValidationInfo) -> SpeculationSettings:
        """The default lookaheads depend on the target's settings."""
        target = others.data.get("target")  # None: it was refused
        if target is None or target.offload == "none" or "lookaheads" in given.model_fields_set:
            return given
        return given.model_copy(update={"lookaheads": OFFLOADED_LOOKAHEADS})

    @model_validator(mode="after")
    def _one_process_takes_turns(self) -> Settings:
        if self.placement.colocate == "all" and (self.speculation.micro_batches or 1) > 1:
            given = self.speculation.micro_batches
            raise ValueError(f"speculation.micro_batches {given} must be 1 where placement.colocate is all")
        return self

    @field_validator("device")
    @classmethod
    def _device_name(cls, value: str) -> str:
        if not DEVICE.fullmatch(value):
            raise ValueError("must be cpu, cuda or cuda:N")
        return value

    @field_validator("graphs", "compile", mode="before")
    @classmethod
    def _on_and_off(cls, value: object) -> object:
        """YAML reads a bare on and off as truth values."""
        return ("on" if value else "off") if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _graphs_need_cuda(self) -> Settings:
        if self.graphs == "on" and self.device_type != "cuda":
            raise ValueError(f"graphs 'on' must be auto, eager or off where device is {self.device}")
        return self

    @model_validator(mode="after")
    def _int4_has_a_kernel(self) -> Settings:
        if self.retrieval.quantization == "int4" and (
            self.device_type != "cuda" or self.dtype not in ("auto", "bfloat16")
        ):
            given = f"device {self.device} and dtype {self.dtype}"
            raise ValueError(f"retrieval.quantization int4 needs device cuda and dtype bfloat16, not {given}; try int8")
        return self

    @model_validator(mode="after")
    def _whole_weights_are_quantised(self) -> Settings:
        ranks = self.ranks(("retrieval",))
        if self.retrieval.quantization and ranks > 1:
            given = self.retrieval.quantization
            raise ValueError(f"retrieval.quantization {given} must be null with tensor_parallel {ranks}")
        return self

    @model_validator(mode="after")
    def _ranks_have_devices(self) -> Settings:
        if max(map(self.ranks, COLOCATED["none"])) == 1:
            return self
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device {self.device!r} must be cpu or cuda with tensor_parallel: each rank has its own")
        if self.placement.colocate == "all" and self.ranks(("target",)) != self.ranks(("retrieval",)):
            one, other = self.ranks(("target",)), self.ranks(("retrieval",))
            raise ValueError(
                f"retrieval.tensor_parallel {other} must be target.tensor_parallel {one}: they share weights"
            )
        for group in self.placement.groups:
            if self.ranks(group.tiers) > 1 and group.gpus % 1:
                raise ValueError(
                    f"placement: {group.name} reserves {group.gpus:g} GPUs for each of {self.ranks(group.tiers)} ranks:"
                    " must be whole, for two shares may be of the same GPU"
                )
        return self

    def ranks(self, tiers: tuple[str, ...]) -> int:
        """How many processes tiers in one process become by tensor parallelism; the first of them is that process."""
        of_target = self.target.tensor_parallel
        of = {"target": of_target, "retrieval": self.retrieval.tensor_parallel or of_target, "draft": 1}
        return max(of[tier] for tier in tiers)

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    @property
    def chooses_threads(self) -> bool:
        """Whether the tiers' CPU threads are measured: on a CPU, where `threads` is not set and no tier is divided over ranks."""
        one_process = self.ranks(("target", "retrieval")) == 1
        return self.device_type == "cpu" and one_process and self.threads is None

    @property
    def fused(self) -> bool:
        """Whether models are to run fused kernels."""
        return self.compile == "on" or (self.compile == "auto" and self.device_type == "cuda")

    @property
    def micro_batches(self) -> int:
        """Of a pipeline: as set, or as many as it has processes to work at the same time."""
        return self.speculation.micro_batches or len(self.placement.groups)

    @property
    def places(self) -> int:
        """Requests, waiting ones included, that the server holds at most."""
        return self.server.max_queued + self.server.replicas.max * self.max_sequences


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
