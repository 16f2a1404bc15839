"""All settings, as one pydantic model. `triforce config` prints them; unknown keys are refused."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from triforce_core.errors import InvalidValueError, require

TIER_SETS = {"target": (False, False), "retrieval,target": (True, False), "draft,retrieval,target": (True, True)}
TierSet = Literal["target", "retrieval,target", "draft,retrieval,target"]
# The processes for each value of `placement.colocate`: the target's first; within each, the uppermost tier first.
COLOCATED = {
    "none": (("target",), ("retrieval",), ("draft",)),
    "draft_with_retrieval": (("target",), ("retrieval", "draft")),
    "all": (("target", "retrieval", "draft"),),
    "auto": (("target",), ("retrieval",), ("draft",)),  # replaced on one machine by actors/colocation.py
}
# The keys of `kv.selectors.SELECTORS`.
SelectorName = Literal["mean_key", "snapkv", "h2o", "streaming"]
SELECTOR_NAMES: tuple[str, ...] = get_args(SelectorName)
# Of earlier versions, with what chooses as well.
REMOVED_SELECTORS = {"quest": "snapkv", "mean_key_recent": "mean_key"}
# Greatest lookahead of a tier in settings and requests. A plan without the retrieval tier
# may give both lookaheads to the draft tier.
MAX_LOOKAHEAD = 64
MAX_NODES = 64  # of a tree that one tier proposes to another
Lookahead = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_LOOKAHEAD})]
DEVICE = re.compile(r"cpu|cuda(:\d+)?")
# With offload, copying KV dominates the cost of a pass: large prefill chunks and long blocks need fewer passes.
OFFLOADED_PREFILL_CHUNK = 32_768
OFFLOADED_LOOKAHEADS = (16, 3)
ORIGIN = re.compile(r"https?://[^/\s*]+")
LABEL_SELECTOR = re.compile(r"!?(in\([\w.-]+(, ?[\w.-]+)*\)|[\w.-]+)")


def on_or_off(value: object) -> object:
    """Restore on and off, which YAML reads as booleans unless quoted."""
    return ("on" if value else "off") if isinstance(value, bool) else value


MillisecondsOrOff = Annotated[float, Field(gt=0)] | Literal["off", False] | None


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DraftSettings(Strict):
    """The draft tier: a tiny model with a StreamingLLM cache, or prompt lookup instead. Sizes are in tokens."""

    model: str = Field(  # a key of `building.drafters.DRAFTERS`, otherwise a model
        "demo",
        description="directory, *.gguf file, hub id, `demo` for the demo pair's, or `ngram` for prompt lookup; by"
        " default the demo pair's where the target is, else prompt lookup",
    )
    window: int = Field(
        252, ge=1, description="last tokens that a draft model sees; smaller for a short context or little memory"
    )
    cache: Literal["streaming", "heavy_hitter"] = Field(
        "streaming",
        description="tokens that a draft model sees; streaming: the first 4 tokens and the window; heavy_hitter (H2O):"
        " the same number of tokens, half of them the tokens with the most attention and half the latest tokens;"
        " heavy_hitter needs a drafter with at least as many positions as the text has tokens",
    )

    @property
    def slack(self) -> int:
        """Tokens by which the window may grow before it is moved: half of the sinks and window together.

        Moving the window forwards all of it again; this slack makes that rare and still keeps the cache small.
        """
        return (self.window + 4) // 2


class RetrievalSettings(Strict):
    """The retrieval tier: the target's weights, by default, over a sparse cache. Sizes are in tokens."""

    model: str | None = Field(
        None, description="another model for the retrieval tier, such as a distilled target; by default the target"
    )
    quantization: Literal["int8"] | None = Field(
        None, description="8-bit weights for the retrieval tier, for faster steps on a GPU; the target keeps its own"
    )
    tensor_parallel: int | None = Field(
        None, ge=1, description="GPUs that the retrieval tier is divided over; by default as many as the target"
    )
    budget: int = Field(
        1024,
        ge=2,
        description="most tokens in a snapshot; a larger budget raises acceptance and makes each step slower; by"
        " default 1024, or on one machine up to 4096 for a context of more than 32K",
    )
    chunk: int = Field(
        8, ge=1, description="tokens that are selected together; smaller chunks fit better but take longer to rank"
    )
    refresh_every: int = Field(
        64, ge=1, description="tokens between snapshots; a smaller number keeps them fresher but sends more of them"
    )
    selector: SelectorName = Field(
        "snapkv",
        description="how chunks are ranked, for requests that do not say (docs/selectors.md); with offload by default"
        " `mean_key`; `h2o` slows prompts down",
    )

    @field_validator("selector", mode="before")
    @classmethod
    def _removed(cls, value: object) -> object:
        if isinstance(value, str) and value in REMOVED_SELECTORS:
            raise ValueError(f"{value!r} was removed: use {REMOVED_SELECTORS[value]}")
        return value

    transport: Literal["object_store", "rdt"] = Field(
        "object_store",
        description="how snapshots travel between tier actors: through Ray's object store, or from GPU to GPU by Ray"
        " Direct Transport, which needs NIXL",
    )

    @property
    def own_weights(self) -> bool:
        """Whether the retrieval tier's weights differ from the target's."""
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

    model: str = Field("demo", description="directory, *.gguf file, hub id, `smollm2`, or `demo` for the demo pair's")
    served_name: str | None = Field(
        None, description="the name that clients use; by default the last part of `model`, without .gguf"
    )
    chat_template: str | None = Field(
        None,
        description="file with a jinja template that renders chats to prompts; by default the model's own, or a plain"
        " one for a model without",
    )
    generation_config: Literal["model", "none"] = Field(
        "model",
        description="where requests get the sampling parameters that they do not state: from the model's"
        " generation_config.json, if it has one; none: temperature 1, and the others off",
    )
    tensor_parallel: int = Field(
        1, ge=1, description="GPUs that the weights and KV heads are divided over, for models that one GPU cannot hold"
    )
    context_length: int | None = Field(
        None,
        ge=2,
        description="most tokens of prompt and output together; by default as many as the model allows, and on"
        " one machine as the free memory has room for",
    )
    kv_pool_tokens: int | None = Field(
        None,
        ge=2,
        description="tokens of KV for all requests together; a larger pool lets more requests run at once; by default"
        " what the share of the GPU that is reserved has room for, on a CPU up to half of the free memory and"
        " max_sequences whole contexts, with offload one context",
    )
    offload: Literal["none", "host", "disk"] = Field(
        "none", description="where KV is kept instead of on the device: in host memory, or in a file on disk"
    )
    resident_layers: int = Field(
        0,
        ge=0,
        description="with offload, how many of the first layers keep their KV on the device; set as many as fit",
    )
    offload_path: str | None = Field(None, description="directory of the KV file when offload is disk")
    prefix_cache: bool = Field(
        True,
        description="keep the KV of texts while there is room, so that requests that begin alike read their common"
        " beginning once; never where deterministic",
    )
    eviction: Literal["none", "heavy_hitter", "streaming"] = Field(
        "none",
        description="LOSSY unless none: each request keeps kv_budget tokens of KV and forgets the others, so its tokens"
        " are not those of the model; heavy_hitter (H2O) keeps the tokens with the most attention and the latest"
        " tokens, streaming (StreamingLLM) the first 4 and the latest tokens; without speculation",
    )
    kv_budget: int | None = Field(
        None, ge=16, description="with eviction, tokens of KV that each request keeps; by default 1024"
    )
    heavy_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="with heavy_hitter, the share of kv_budget for tokens with the most attention; the rest are the"
        " latest tokens",
    )
    prefill_chunk: int = Field(
        default_factory=lambda given: 2048 if given.get("offload") == "none" else OFFLOADED_PREFILL_CHUNK,
        ge=16,
        description="most prompt tokens of one forward pass, rounded down to a multiple of 64; by default 2048, or"
        f" {OFFLOADED_PREFILL_CHUNK} with offload",
    )
    max_stall_ms: float | None = Field(
        200.0,
        gt=0,
        allow_inf_nan=False,
        description="most milliseconds by which prompts of other requests delay the next tokens of a request, or half"
        " of the time that these tokens take by themselves if that is more; a smaller number makes prompts slower;"
        " off: no limit, so that a pass takes up to prefill_chunk prompt tokens",
    )
    audit: float = Field(
        0.0,
        ge=0,
        le=1,
        description="share of the verified blocks that are computed again, one token at a time, and compared",
    )

    @field_validator("max_stall_ms", mode="before", json_schema_input_type=MillisecondsOrOff)
    @classmethod
    def _off(cls, value: object) -> object:
        if value is True:
            raise ValueError("must be a number of milliseconds, or off")
        return None if value is False or value == "off" else value

    @property
    def kept_tokens(self) -> int:
        """With eviction: the tokens of KV that a request keeps. A quarter more are held before some are evicted."""
        return self.kv_budget or 1024

    @property
    def lossy(self) -> str | None:
        """What is forgotten, in words, for all who must know that outputs are not the model's own; None: nothing."""
        if self.eviction == "none":
            return None
        return f"{self.eviction} keeps {self.kept_tokens} tokens of KV of each request and forgets the others"

    def require_lossless(self, because: str = "a target that forgets does not speculate") -> None:
        """Raises `InvalidValueError` where the target forgets."""
        require(self.eviction == "none", "target.eviction", self.eviction, f"must be none: {because}")

    @model_validator(mode="after")
    def _sound(self) -> TargetSettings:
        if self.audit and (self.offload != "none" or self.tensor_parallel > 1):
            raise ValueError(f"audit {self.audit} must be 0 with offload or tensor_parallel")
        if self.eviction == "none" and self.kv_budget is not None:
            raise ValueError(f"kv_budget {self.kv_budget} must be null where eviction is none: all KV is kept")
        if self.eviction != "heavy_hitter" and self.heavy_share != 0.5:
            raise ValueError(f"heavy_share {self.heavy_share:g} must be 0.5 where eviction is {self.eviction}")
        others = {"offload": "none", "tensor_parallel": 1, "kv_pool_tokens": None, "audit": 0}
        for field, needed in others.items() if self.eviction != "none" else ():
            given = getattr(self, field)
            if given != needed:
                rule = "null" if needed is None else needed
                raise ValueError(f"{field} {given} must be {rule} where eviction is {self.eviction}")
        if self.resident_layers and self.offload == "none":
            raise ValueError(f"resident_layers {self.resident_layers} must be 0 where offload is none: all layers stay")
        if self.offload == "disk" and not self.offload_path:
            raise ValueError("offload_path must name a directory where offload is disk")
        if self.offload != "disk" and self.offload_path is not None:
            raise ValueError(f"offload_path {self.offload_path!r} must be null where offload is {self.offload}")
        return self


class SpeculationSettings(Strict):
    """Which tiers take part, and how far they draft for requests that do not say."""

    tiers: TierSet = Field(
        "draft,retrieval,target",
        description="tiers that take part; omit tiers that cost more than they gain; `target` alone is plain decoding",
    )
    lookaheads: tuple[Lookahead, Lookahead] = Field(
        (8, 3),
        description="most tokens that the retrieval tier and the draft tier draft ahead;"
        f" by default (8, 3), or {OFFLOADED_LOOKAHEADS} when the target's KV is offloaded",
    )
    controller: bool = Field(
        True,
        description="choose whether, how and how far to draft, by what rounds take and what is accepted, again every 8"
        " tokens and when requests join or leave; off: always draft as far as the lookaheads say",
    )
    nodes: int = Field(
        11,
        ge=0,
        le=MAX_NODES,
        description="most tokens of a tree of continuations that the draft tier's model proposes to the retrieval tier,"
        " for requests that the controller plans; with 0 it proposes one continuation",
    )
    micro_batches: int | None = Field(
        None,
        ge=1,
        le=64,
        description="groups of live requests that the tiers work on concurrently; with 1 the tiers take turns;"
        " by default one per process of `placement.colocate`",
    )
    run_ahead: bool = Field(
        True, description="continue drafting while the target verifies, if fewer requests than micro-batches are live"
    )

    @model_validator(mode="after")
    def _bounded(self) -> SpeculationSettings:
        if not all(0 <= n <= MAX_LOOKAHEAD for n in self.lookaheads):
            raise ValueError(f"lookaheads {self.lookaheads} must each be between 0 and {MAX_LOOKAHEAD}")
        return self

    @property
    def effective(self) -> tuple[int, int]:
        """The lookaheads, with 0 for each tier that does not take part."""
        retrieval, draft = TIER_SETS[self.tiers]
        return self.lookaheads[0] * retrieval, self.lookaheads[1] * draft


class TierPlacement(Strict):
    """What Ray reserves for a tier, and where."""

    gpus: float = Field(
        0.0, ge=0, description="GPUs that Ray reserves: a whole number, or a fraction of one GPU that others may share"
    )
    labels: dict[str, str] = Field(
        {},
        description="Ray labels that the node must have, such as {ray.io/accelerator-type: H100}; a value may also be"
        " !v, in(v,w) or !in(v,w)",
    )
    cores: tuple[int, ...] | None = Field(
        None,
        min_length=1,
        description="CPU cores of the node to which the tier is bound, to separate it from other tiers; by default all",
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
    """Tiers that share a process and its device. Each rank of the group reserves the sum of what its tiers reserve."""

    tiers: tuple[str, ...]  # their names, the uppermost first
    cpus: float
    gpus: float
    labels: dict[str, str]
    cores: tuple[int, ...] | None  # None: all

    @property
    def name(self) -> str:
        return " + ".join(self.tiers)


class PlacementSettings(Strict):
    """Where the tiers of a pipeline run. Co-located tiers share one process and its device."""

    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        "PACK", description="how Ray spreads the processes over nodes: a placement group strategy"
    )
    colocate: Literal["none", "draft_with_retrieval", "all", "auto"] = Field(
        "none",
        description="which tiers share a process and its device, to use fewer GPUs; `all` also shares weights; `auto`:"
        " as few processes as suit this machine's GPUs or cores, and in a cluster none",
    )
    cpu_latency_us: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="longest time in microseconds that CPU cores of the tiers' nodes may take to wake; 0: they never"
        " sleep; a lower limit shortens the latency between tiers and takes more power; by default no limit",
    )
    cpus: float = Field(
        0.1,
        ge=0,
        description="CPUs that Ray reserves for each tier on each rank; raise it to keep other Ray work off the node",
    )
    draft: TierPlacement = TierPlacement()
    retrieval: TierPlacement = TierPlacement()
    target: TierPlacement = TierPlacement()

    @property
    def groups(self) -> tuple[DeviceGroup, ...]:
        """The processes of a pipeline; the process with the target comes first."""
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
    """The number of replicas of the whole pipeline. Ray Serve adds and removes replicas with the load."""

    min: int = Field(1, ge=1, description="replicas that run at any load")
    max: int = Field(1, ge=1, description="most replicas that run under load; each reserves its own GPUs")
    downscale_delay_s: float = Field(
        600.0, ge=0, description="seconds that a replica must be unneeded before it is removed"
    )

    @model_validator(mode="after")
    def _ordered(self) -> ReplicaSettings:
        if self.min > self.max:
            raise ValueError(f"min {self.min} must be at most max {self.max}")
        return self


class ServerSettings(Strict):
    """The HTTP and gRPC servers, and the number of pipelines behind them."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 accepts other machines")
    port: int = Field(8000, ge=1, le=65535, description="port of the HTTP API")
    grpc_port: int = Field(9000, ge=1, le=65535, description="port of the gRPC API")
    certificate: str | None = Field(
        None,
        description="a file with the server's certificate, and those between it and the root, in PEM: HTTP and gRPC are"
        " then served over TLS; it is read again when it changes",
    )
    certificate_key: str | None = Field(None, description="a file with the certificate's private key, in PEM")
    connections_per_peer: int = Field(
        1024, ge=1, description="connections that one address may have open; all together have at most 4096"
    )
    max_queued: int = Field(
        64,
        ge=1,
        description="requests that may wait, in addition to the requests that all replicas can decode at once; further"
        " requests get status 429",
    )
    request_timeout_s: float = Field(600.0, gt=0, description="most seconds that a request may take, waiting included")
    drain_timeout_s: float | None = Field(
        None,
        ge=0,
        description="seconds that requests in flight have to finish when a replica or the server stops; by default"
        " request_timeout_s",
    )
    tier_host: str | None = Field(
        None,
        description="address on which tier actors listen for one another; `node`: the address of each actor's Ray node;"
        " by default loopback if all processes of the pipeline are on one node, otherwise `node`",
    )
    link_timeout_s: float = Field(
        10.0,
        gt=0,
        description="seconds after which a tier that does not answer counts as dead; half of it for the draft tier; set"
        " it above twice the longest pass of a tier",
    )
    api_keys: str | None = Field(
        None,
        description="a file with one API key a line (or `name: key`), without which clients get status 401; it is read"
        " again while the server runs; by default no key is needed",
    )
    cors_origins: tuple[str, ...] = Field(
        (),
        description="origins whose pages may call the HTTP API from a browser, such as https://app.example.com, or *",
    )
    log: Literal["text", "json"] = Field(
        "text", description="form of the gateway's and the replicas' logs; each request is a line of the gateway's"
    )
    replicas: ReplicaSettings = ReplicaSettings()

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for origin in given:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} must be * or an origin such as https://app.example.com, without a path")
        return given

    @model_validator(mode="after")
    def _certified(self) -> ServerSettings:
        if (self.certificate is None) != (self.certificate_key is None):
            raise ValueError("certificate and certificate_key must be given together")
        return self

    @property
    def drain_s(self) -> float:
        return self.request_timeout_s if self.drain_timeout_s is None else self.drain_timeout_s


Section = TypeVar("Section", bound=Strict)


def where_offloaded(given: Section, others: ValidationInfo, field: str, value: object) -> Section:
    """The given settings, with another default of a field where the target's KV is offloaded."""
    target = others.data.get("target")  # None: the given target settings were refused
    if target is None or target.offload == "none" or field in given.model_fields_set:
        return given
    return given.model_copy(update={field: value})


class Settings(Strict):
    """All settings of a pipeline and of the server in front of it."""

    deterministic: bool = Field(
        False,
        description="run the same passes for the same request every time, whatever else is asked, so that it gets the"
        " same tokens in 16 bits too: one process, one request at a time, chunks of constant size; slower",
    )
    target: TargetSettings = Field(TargetSettings(), validate_default=True)
    retrieval: RetrievalSettings = Field(RetrievalSettings(), validate_default=True)
    draft: DraftSettings = Field(DraftSettings(), validate_default=True)
    speculation: SpeculationSettings = Field(SpeculationSettings(), validate_default=True)
    placement: PlacementSettings = Field(PlacementSettings(), validate_default=True)
    server: ServerSettings = ServerSettings()
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="precision of weights, KV and arithmetic, the same for all replicas; auto is bfloat16 on CUDA; on"
        " CPUs it is bfloat16 if every node that may hold a target has bfloat16 instructions, else float32",
    )
    device: str = Field(
        "cpu", description="cpu, cuda or cuda:N", json_schema_extra={"pattern": f"^({DEVICE.pattern})$"}
    )
    attention: str | None = Field(
        None,
        description="name of the attention kernel, such as blocked, which fits every head size; by default chosen by"
        " device and dtype",
    )
    exact: Annotated[
        Literal["auto", "on", "off"],
        BeforeValidator(on_or_off, json_schema_input_type=Literal["auto", "on", "off", True, False]),
    ] = Field(
        "auto",
        description="compute the same bits for a token whatever else is in the pass, so that the tokens of a request"
        " never depend on other requests, drafts or chunks, not even where scores tie; auto does so on CPUs if a check"
        " at start finds that it holds, on refuses to start where it does not, off is a few percent faster",
    )
    graphs: Annotated[
        Literal["auto", "on", "eager", "off"],
        BeforeValidator(on_or_off, json_schema_input_type=Literal["auto", "on", "eager", "off", True, False]),
    ] = Field(
        "auto",
        description="how passes over few tokens run: on captures them as CUDA graphs, eager runs the same code without"
        " capture, off treats them like other passes; auto is on for CUDA and off for the CPU",
    )
    compile: Annotated[
        Literal["auto", "on", "off"],
        BeforeValidator(on_or_off, json_schema_input_type=Literal["auto", "on", "off", True, False]),
    ] = Field(
        "auto",
        description="fuse norms, rotary embeddings and activations with torch.compile at start; auto is on for CUDA if"
        " a compiler works, and off for the CPU; models on several ranks are not fused",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of every forward pass; set it if other programs need the cores; by default all cores"
        " for prompts, and for decoding a number that each tier finds by the times of its passes",
    )
    max_sequences: int = Field(
        default_factory=lambda given: 1 if given.get("deterministic") else 8,
        ge=1,
        description="most requests that a pipeline decodes at the same time; more requests need more KV memory;"
        " by default 8, or on one machine fewer where memory is short, and 1 where deterministic",
    )

    @field_validator("target")
    @classmethod
    def _constant_chunks(cls, given: TargetSettings, others: ValidationInfo) -> TargetSettings:
        """Where deterministic, chunks do not depend on times."""
        if not others.data.get("deterministic"):
            return given
        if "max_stall_ms" in given.model_fields_set and given.max_stall_ms is not None:
            raise ValueError(f"max_stall_ms {given.max_stall_ms:g} must be off where deterministic is true")
        return given.model_copy(update={"max_stall_ms": None})

    @field_validator("speculation")
    @classmethod
    def _alone_where_evicting(cls, given: SpeculationSettings, others: ValidationInfo) -> SpeculationSettings:
        """A target that evicts decodes alone: its passes read so little KV that there is nothing to win."""
        target = others.data.get("target")
        if target is None or target.eviction == "none":
            return given
        if "tiers" in given.model_fields_set and given.tiers != "target":
            raise ValueError(f"tiers {given.tiers} must be target where target.eviction is {target.eviction}")
        if "lookaheads" in given.model_fields_set and any(given.lookaheads):
            raise ValueError(f"lookaheads {given.lookaheads} must be (0, 0) where target.eviction is {target.eviction}")
        return given.model_copy(update={"tiers": "target"})

    @field_validator("draft")
    @classmethod
    def _lookup_for_any_target(cls, given: DraftSettings, others: ValidationInfo) -> DraftSettings:
        """A drafter that is not named fits its target: the demo pair's, or prompt lookup, which fits all."""
        target = others.data.get("target")
        if target is None or target.model == "demo" or "model" in given.model_fields_set:
            return given
        return given.model_copy(update={"model": "ngram"})

    @field_validator("placement")
    @classmethod
    def _one_process(cls, given: PlacementSettings, others: ValidationInfo) -> PlacementSettings:
        """A target that evicts is alone in its process. Where deterministic, the tiers share one, so that they take
        turns in one order.
        """
        target = others.data.get("target")
        where = "deterministic is true" if others.data.get("deterministic") else ""
        if target is not None and target.eviction != "none":
            where = f"target.eviction is {target.eviction}"
        if not where:
            return given
        if "colocate" in given.model_fields_set and given.colocate not in ("all", "auto"):
            raise ValueError(f"colocate {given.colocate} must be all where {where}")
        return given.model_copy(update={"colocate": "all"})

    @field_validator("retrieval")
    @classmethod
    def _means_where_offloaded(cls, given: RetrievalSettings, others: ValidationInfo) -> RetrievalSettings:
        """With offloaded KV the default selector is the one that does not move all keys to the device."""
        return where_offloaded(given, others, "selector", "mean_key")

    @field_validator("speculation")
    @classmethod
    def _further_where_offloaded(cls, given: SpeculationSettings, others: ValidationInfo) -> SpeculationSettings:
        """With offloaded KV the default lookaheads are longer."""
        return where_offloaded(given, others, "lookaheads", OFFLOADED_LOOKAHEADS)

    @field_validator("device")
    @classmethod
    def _device_name(cls, value: str) -> str:
        if not DEVICE.fullmatch(value):
            raise ValueError("must be cpu, cuda or cuda:N")
        return value

    @model_validator(mode="after")
    def _together(self) -> Settings:
        if self.deterministic and self.max_sequences > 1:
            raise ValueError(f"max_sequences {self.max_sequences} must be 1 where deterministic is true")
        if self.placement.colocate == "all" and (self.speculation.micro_batches or 1) > 1:
            given = self.speculation.micro_batches
            raise ValueError(f"speculation.micro_batches {given} must be 1 where placement.colocate is all")
        if self.exact == "on" and self.inexact:
            raise ValueError(f"exact 'on' must be auto or off where {self.inexact}")
        if self.graphs == "on" and self.device_type != "cuda":
            raise ValueError(f"graphs 'on' must be auto, eager or off where device is {self.device}")
        quantization, ranks = self.retrieval.quantization, self.ranks(("retrieval",))
        if quantization and ranks > 1:
            raise ValueError(f"retrieval.quantization {quantization} must be null with tensor_parallel {ranks}")
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
        """The number of ranks (processes) of a group that holds these tiers; 1 without tensor parallelism."""
        of_target = self.target.tensor_parallel
        of = {"target": of_target, "retrieval": self.retrieval.tensor_parallel or of_target, "draft": 1}
        return max(of[tier] for tier in tiers)

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    @property
    def chooses_threads(self) -> bool:
        """Whether CPU threads are chosen by times. Not where deterministic: they change how sums are rounded. Not where
        kernels are fused: they are compiled anew for each number.
        """
        one_process = self.ranks(("target", "retrieval")) == 1
        free = self.threads is None and not self.deterministic and not self.fused
        return self.device_type == "cpu" and one_process and free

    @property
    def inexact(self) -> str:
        """Why a target of these settings does not compute the same bits in every pass; "" if it may."""
        graphs, ranks = self.graphs in ("on", "eager"), self.ranks(("target",))
        reasons = {
            "exact is off": self.exact == "off",
            "on CUDA exact must be on, because attention in blocks is slow there": self.exact == "auto"
            and self.device_type == "cuda",
            f"target.eviction is {self.target.eviction}": self.target.eviction != "none",
            f"target.tensor_parallel is {ranks}": ranks > 1,
            f"graphs is {self.graphs}": graphs,
            f"attention is {self.attention}": self.attention is not None,
        }
        return next((why for why, holds in reasons.items() if holds), "")

    @property
    def fused(self) -> bool:
        """Whether models should run fused kernels."""
        return self.compile == "on" or (self.compile == "auto" and self.device_type == "cuda")

    @property
    def cold(self) -> Settings:
        """The same settings without the prefix cache: for benchmarks, which repeat their prompts."""
        return self.model_copy(update={"target": self.target.model_copy(update={"prefix_cache": False})})

    @property
    def controlled(self) -> bool:
        """Whether the controller plans requests that set no lookaheads; not where deterministic: it goes by times."""
        return self.speculation.controller and any(self.speculation.effective) and not self.deterministic

    @property
    def micro_batches(self) -> int:
        """The micro-batches of a pipeline: as set, otherwise one per process, because processes work concurrently."""
        return self.speculation.micro_batches or len(self.placement.groups)

    @property
    def places(self) -> int:
        """The most requests that the server holds, waiting ones included."""
        return self.server.max_queued + self.server.replicas.max * self.max_sequences


def load_settings(path: Path | None = None, **overrides: Any) -> Settings:
    """The settings of a YAML file, or the defaults, with `overrides` by section. Raises `InvalidValueError`."""
    data = {} if path is None else read_mapping(path, "config")
    for section, value in overrides.items():
        given = data.get(section)
        if isinstance(value, dict) and isinstance(given, dict):
            data[section] = given | value
        # a section that is no mapping stays, so that `Settings` refuses it
        elif given is None or not isinstance(value, dict):
            data[section] = value
    try:
        return Settings.model_validate(data)
    except ValidationError as error:
        raise invalid_value(error) from None


def read_mapping(path: Path, field: str) -> dict[str, Any]:
    """The mapping in a YAML file, which may be empty. Raises `InvalidValueError` naming `field`."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except PermissionError:
        raise InvalidValueError(field, str(path), f"must be a file that user {os.geteuid()} can read") from None
    except OSError as error:
        raise InvalidValueError(field, str(path), f"cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidValueError(field, str(path), f"is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise InvalidValueError(field, str(path), "must be a mapping of sections")
    return data


def invalid_value(error: ValidationError) -> InvalidValueError:
    """The first error of a pydantic `ValidationError`, as an `InvalidValueError`."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "settings"
    rule = first["msg"].removeprefix("Value error, ")
    return InvalidValueError(field, first["input"], f"is refused: {rule}")
