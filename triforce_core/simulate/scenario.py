"""The input of a simulation, validated when it is loaded. `docs/simulate.md` explains each part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from triforce_core.config import MAX_LOOKAHEAD, invalid_value, read_mapping
from triforce_core.errors import require
from triforce_core.messages import Tier

Colocate = Literal["none", "draft_with_retrieval", "all"]

# The tiers that share each device, by value of the setting `placement.colocate`.
PLACEMENTS: dict[Colocate, tuple[tuple[Tier, ...], ...]] = {
    "none": ((Tier.DRAFT,), (Tier.RETRIEVAL,), (Tier.TARGET,)),
    "draft_with_retrieval": ((Tier.DRAFT, Tier.RETRIEVAL), (Tier.TARGET,)),
    "all": ((Tier.DRAFT, Tier.RETRIEVAL, Tier.TARGET),),
}


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StagePoint(Strict):
    """One measured pass of a tier."""

    batch: int = Field(1, ge=1, description="requests in the pass")
    tokens: int = Field(1, ge=1, description="query tokens per request")
    context: int | None = Field(None, ge=1, description="tokens of KV per request; in all points of a tier or in none")
    ms: float = Field(gt=0, description="milliseconds that the pass takes")


class Stages(Strict):
    """Pass times of each tier; tiers that the lookaheads skip need none."""

    draft: tuple[StagePoint, ...] = ()
    retrieval: tuple[StagePoint, ...] = ()
    target: tuple[StagePoint, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _tables(self) -> Stages:
        for tier in Tier:
            points = self.of(tier)
            field, places = f"stages.{tier.name.lower()}", [(p.batch, p.tokens, p.context) for p in points]
            contexts = [context for _, _, context in places]
            stated = {context is not None for context in contexts}
            require(len(stated) < 2, field, contexts, "must state `context` in all of its points or in none")
            twice = [place for place in places if places.count(place) > 1]
            require(not twice, field, twice, "must state each (batch, tokens, context) once")
        return self

    def of(self, tier: Tier) -> tuple[StagePoint, ...]:
        return {Tier.DRAFT: self.draft, Tier.RETRIEVAL: self.retrieval, Tier.TARGET: self.target}[tier]


class Hops(Strict):
    """Milliseconds that a message takes one way between two tiers; 0 between tiers on the same device."""

    target_retrieval: float = Field(0.0, ge=0)
    retrieval_draft: float = Field(0.0, ge=0)


class AssumedAcceptance(Strict):
    """Chance that a proposed token is accepted when all earlier tokens of its block were."""

    retrieval: float = Field(ge=0, le=1, description="alpha2: a retrieval token, by the target")
    draft: float = Field(0.0, ge=0, le=1, description="alpha1: a draft token, by the retrieval tier")


def _as_sequence(value: Any) -> Any:
    return (value,) if isinstance(value, int | str) else value


TokenCount = Annotated[int, Field(ge=1)]
TokenCounts = Annotated[tuple[TokenCount, ...], BeforeValidator(_as_sequence), Field(min_length=1)]


class Load(Strict):
    """The requests of the users: a fixed number at a time (closed loop), or a rate per second (Poisson arrivals)."""

    concurrency: int | None = Field(None, ge=1, description="users who each have one request at a time")
    rate_per_s: float | None = Field(None, gt=0, description="requests per second, over all replicas")
    prompt_tokens: TokenCounts = Field((1024,), description="one length, or several to draw from evenly")
    output_tokens: TokenCounts = Field((256,), description="one length, or several to draw from evenly")

    @model_validator(mode="after")
    def _one_kind(self) -> Load:
        given = self.model_dump(include={"concurrency", "rate_per_s"}, exclude_none=True)
        require(len(given) == 1, "load", given, "must state either concurrency or rate_per_s")
        return self


class Prefill(Strict):
    """Prefill in the target's passes: up to `chunk` prompt tokens per pass lengthen it, at `tokens_per_s`."""

    tokens_per_s: float = Field(gt=0)
    chunk: int = Field(2048, ge=1, description="most prompt tokens in a pass")


class Failure(Strict):
    """Mean time between failures of a tier's process (exponentially distributed), and time to recover, in seconds."""

    mtbf_s: float = Field(gt=0)
    recovery_s: float = Field(gt=0)


class Failures(Strict):
    """The failures of each tier; None: the tier never fails."""

    draft: Failure | None = None
    retrieval: Failure | None = None
    target: Failure | None = None

    def of(self, tier: Tier) -> Failure | None:
        return {Tier.DRAFT: self.draft, Tier.RETRIEVAL: self.retrieval, Tier.TARGET: self.target}[tier]


class Scenario(Strict):
    """Everything that shapes one simulation."""

    stages: Stages
    acceptance: AssumedAcceptance
    load: Load
    hop_ms: Hops = Hops()
    jitter_ms: float = Field(0.0, ge=0, description="each message takes up to this much longer, evenly distributed")
    lookaheads: tuple[int, int] = Field(
        (8, 3), description="tokens drafted by the retrieval tier, and by the draft tier"
    )
    micro_batches: int = Field(3, ge=1, description="1 is sequential mode: every pass waits for all requests")
    run_ahead: bool = False
    colocate: Colocate = "none"
    replicas: int = Field(1, ge=1, le=1024)
    max_sequences: int = Field(8, ge=1, description="requests that one replica decodes at the same time")
    prefill: Prefill | None = Field(None, description="by default prompts cost nothing")
    failures: Failures = Failures()
    duration_s: float = Field(60.0, gt=0, description="simulated seconds in which requests arrive")
    warmup_s: float = Field(0.0, ge=0, description="seconds at the beginning that are not measured")
    seed: int = 0

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        retrieval, draft = self.lookaheads
        bounded = all(0 <= n <= MAX_LOOKAHEAD for n in self.lookaheads)
        require(bounded, "lookaheads", self.lookaheads, f"must be between 0 and {MAX_LOOKAHEAD}")
        rule = "must have 0 for the draft tier where the retrieval tier has 0"
        require(not draft or retrieval > 0, "lookaheads", self.lookaheads, rule)
        for tier in self.tiers:
            rule = f"must be given, because lookaheads {self.lookaheads} use this tier"
            require(bool(self.stages.of(tier)), f"stages.{tier.name.lower()}", (), rule)
        rule = f"must be below duration_s {self.duration_s}"
        require(self.warmup_s < self.duration_s, "warmup_s", self.warmup_s, rule)
        if self.run_ahead:
            rule = "needs micro_batches of 2 or more: it runs where fewer requests are live than that"
            require(self.micro_batches > 1, "run_ahead", True, rule)
            require(retrieval > 0, "run_ahead", True, "needs a retrieval lookahead above 0")
            rule = "needs the target on a device of its own: elsewhere nothing is idle"
            require(len(self.devices) > 1, "run_ahead", True, rule)
        return self

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that take part."""
        retrieval, draft = self.lookaheads
        return (Tier.DRAFT,) * (draft > 0) + (Tier.RETRIEVAL,) * (retrieval > 0) + (Tier.TARGET,)

    @property
    def devices(self) -> tuple[tuple[Tier, ...], ...]:
        """The devices of one replica, each as the participating tiers that it runs."""
        shared = (tuple(tier for tier in group if tier in self.tiers) for group in PLACEMENTS[self.colocate])
        return tuple(group for group in shared if group)

    def link_s(self, upper: Tier, lower: Tier) -> tuple[float, float]:
        """Seconds that a message between two tiers takes one way, and its largest jitter; 0 on the same device."""
        if any(upper in group and lower in group for group in self.devices):
            return 0.0, 0.0
        hop_ms = self.hop_ms.target_retrieval if upper is Tier.TARGET else self.hop_ms.retrieval_draft
        return hop_ms / 1e3, self.jitter_ms / 1e3

    def users_of(self, replica: int) -> int:
        """Requests that this replica decodes at once: its even share of the users, at most `max_sequences`, or
        `max_sequences` if the load is a rate.
        """
        if self.load.concurrency is None:
            return self.max_sequences
        share, rest = divmod(self.load.concurrency, self.replicas)
        return min(share + (replica < rest), self.max_sequences)


def device_name(tiers: tuple[Tier, ...]) -> str:
    return "+".join(tier.name.lower() for tier in tiers)


def load_scenario(path: Path | None, overrides: dict[str, Any]) -> Scenario:
    """The scenario of a YAML or JSON file with `overrides` merged in, section by section.

    Raises `InvalidValueError` naming field, value and rule.
    """
    data = {} if path is None else read_mapping(path, "scenario")
    for section, value in overrides.items():
        given = data.get(section)
        data[section] = given | value if isinstance(given, dict) and isinstance(value, dict) else value
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise invalid_value(error) from None
