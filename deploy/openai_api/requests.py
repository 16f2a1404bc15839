"""The body of a completion request: its schema, and its conversion to the service's request."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from deploy.service import ClientRequest, check_drafter, check_lookaheads
from triforce_core.config import TIER_SETS, SpeculationSettings, TierSet
from triforce_core.errors import require
from triforce_core.messages import SamplingParams

DEFAULT_MAX_TOKENS = 16  # OpenAI's
SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {"logit_bias"}


def checked_as(rule: str) -> WrapValidator:
    """A validator that reports `rule` alone, where a union would report an error for each of its members."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(rule) from None

    return WrapValidator(validate)


class Body(BaseModel):
    """A body with exact types: "5" is not accepted for 5.

    Ranges are checked by the service, so that all APIs give the same messages.
    """

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool = False


class Speculation(Body):
    """How this request is drafted, in place of what the server would decide for each round. It changes the speed and
    never the output.
    """

    tiers: TierSet | None = Field(None, description="tiers that take part; `target` alone is plain decoding")
    lookaheads: list[int] | None = Field(
        None, description="tokens drafted by the retrieval tier, and by the draft tier"
    )
    drafter: str | None = Field(
        None,
        description="who drafts at the lowest tier: model, lookup or both; without lookaheads, those of the settings",
    )


Prompt = Annotated[
    str | list[int] | list[str] | list[list[int]],
    checked_as("must be a text or a list of token ids, or a list that holds one of these"),
]
Stop = Annotated[str | list[str] | None, checked_as("must be a text or a list of texts")]


class CompletionRequest(Body):
    """The body of a completion request: OpenAI's fields, then those of this server."""

    model: str | None = None
    prompt: Prompt
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    seed: int | None = None
    stop: Stop = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    user: str | None = Field(None, description="accepted and ignored")
    # OpenAI's fields that are not supported; they are accepted only with a value that has no effect.
    n: int | None = 1
    best_of: int | None = 1
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None
    # Fields of this server, beyond OpenAI's.
    top_k: int | None = Field(0, description="keep the k most probable tokens; 0 keeps all")
    min_p: float | None = Field(0.0, description="keep tokens this probable relative to the most probable one")
    repetition_penalty: float | None = Field(1.0, description="for tokens in prompt or output; 1 is off")
    min_tokens: int | None = Field(0, description="nothing ends the output before it has so many tokens")
    speculation: Speculation | None = Field(None, description="how it is drafted; by default the server decides")
    return_token_ids: bool = Field(False, description="give token_ids, their origins and texts with each choice")
    timeout_s: float | None = Field(None, description="give up after this many seconds")
    priority: int | None = Field(0, description="-100 to 100: waiting requests with a lower number are served earlier")


UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # by field, the values that have no effect
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None,),
    "suffix": (None, ""),
}


def client_request_from(body: CompletionRequest, defaults: SpeculationSettings) -> ClientRequest:
    """The service's form of a request. Raises `InvalidValueError` naming the field."""
    for name, accepted in UNSUPPORTED.items():
        value = getattr(body, name)
        rule = f"is not supported: leave it out or set it to {json.dumps(accepted[-1])}"
        require(value in accepted, name, value, rule)
    if body.stream_options is not None:
        require(bool(body.stream), "stream_options", body.stream_options.model_dump(), "needs stream: true")

    drafter = body.speculation.drafter if body.speculation else None
    check_drafter("speculation.drafter", drafter)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    return ClientRequest(
        prompt=prompt_from(body.prompt),
        sampling=SamplingParams(
            **body.model_dump(include=SAMPLING_FIELDS, exclude_none=True), logit_bias=biases_from(body.logit_bias or {})
        ),
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        seed=body.seed,
        stop=tuple(stop or ()),
        model=body.model or "",
        lookaheads=lookaheads_from(body.speculation, defaults),
        timeout_s=body.timeout_s,
        priority=body.priority or 0,
        drafter=drafter,
    )


def biases_from(logit_bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token in logit_bias:
        number = token.isascii() and token.isdecimal() and len(token) <= 10
        require(number, "logit_bias", token, "is not a token id: must be a whole number in quotes")
    return tuple((int(token), bias) for token, bias in logit_bias.items())


def prompt_from(prompt: str | list[int] | list[str] | list[list[int]]) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        counted = f"{len(prompt)} prompts"
        require(len(prompt) == 1, "prompt", counted, "must be one prompt: send each in a request of its own")
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else tuple(prompt)  # type: ignore[arg-type]


def lookaheads_from(speculation: Speculation | None, defaults: SpeculationSettings) -> tuple[int, ...] | None:
    """The lookaheads of a request; None if it sets none.

    If it only names the tiers that draft, their lookaheads come from the settings.
    """
    if speculation is None or (speculation.tiers is None and speculation.lookaheads is None):
        return None
    lookaheads = defaults.lookaheads if speculation.lookaheads is None else speculation.lookaheads
    check_lookaheads("speculation.lookaheads", lookaheads)
    takes_part = TIER_SETS[speculation.tiers] if speculation.tiers else (True, True)
    return tuple(n * part for n, part in zip(lookaheads, takes_part, strict=True))
