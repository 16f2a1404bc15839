"""The body of a completion request: its schema, and its conversion to the service's request."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from deploy.client_request import ClientRequest, check_drafter, check_lookaheads, check_places
from triforce_core.config import SELECTOR_NAMES, TIER_SETS, SpeculationSettings, TierSet
from triforce_core.engine.limits import check_selector
from triforce_core.errors import require
from triforce_core.messages import SamplingParams
from triforce_core.sampling.guides import Guide

DEFAULT_MAX_TOKENS = 16  # OpenAI's
ENTRIES_AT_ONCE = 100
SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {"logit_bias"}


def checked_as(rule: str, flaw: Callable[[Any], str] = lambda value: "") -> WrapValidator:
    """A validator that reports one error, which says the `rule` and then the `flaw` of the value. Without it, a union
    would report an error for each of its members.
    """

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(rule + flaw(value)) from None

    return WrapValidator(validate)


def in_pieces(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Validate an object `ENTRIES_AT_ONCE` entries at a time, up to the first piece with errors, so that there are at
    most that many errors.
    """
    if not isinstance(value, dict):
        return handler(value)
    entries = iter(value.items())
    found: dict[str, Any] = {}
    while piece := dict(islice(entries, ENTRIES_AT_ONCE)):
        found |= handler(piece)
    return found


@dataclass(unsafe_hash=True)
class AtFirstError(FailFast):
    """A `FailFast` that can be hashed, because typing hashes the members of a union."""


# Lists and objects whose validation ends at or soon after the first error. The answer names the first only, and an
# error takes a thousand bytes and more: one for each element of a body would be hundreds of times the body.
T = TypeVar("T")
ListOf = Annotated[list[T], AtFirstError()]
DictOf = Annotated[dict[str, T], WrapValidator(in_pieces)]


class Body(BaseModel):
    """A body with exact types: "5" is not accepted for 5.

    Ranges are checked by the service, so that all APIs give the same messages.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def with_one_unknown_field(cls, given: Any) -> Any:
        """The body. If it has more fields than the schema, all unknown ones but the first are left out, because each
        would be an error of its own.
        """
        if not isinstance(given, dict) or len(given) <= len(cls.model_fields):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        first = next(name for name in given if name not in known)
        return {name: value for name, value in given.items() if name in known or name == first}


class StreamOptions(Body):
    include_usage: bool | None = False
    include_obfuscation: bool | None = Field(None, description="not supported: `null` or `false` only")


class Speculation(Body):
    """How this request is drafted, in place of what the server would decide for each round. It changes the speed and
    never the output.
    """

    tiers: TierSet | None = Field(None, description="tiers that take part; `target` alone is plain decoding")
    lookaheads: ListOf[int] | None = Field(
        None, description="tokens drafted by the retrieval tier, and by the draft tier"
    )
    drafter: str | None = Field(
        None,
        description="who drafts at the lowest tier: model, lookup or both; if lookaheads is not given, the settings'"
        " are used",
    )
    selector: str | None = Field(
        None,
        description=f"how the retrieval tier's chunks are chosen: {', '.join(SELECTOR_NAMES)}; by default the setting",
    )


def odd_element(prompt: Any) -> str:
    """The end of an error message, which names the first element of a wrong kind, or of another kind than the first
    element; empty if there is none.
    """
    elements = prompt if isinstance(prompt, list) else []
    for index, each in enumerate(elements):
        kind = type(each)
        sound = kind in (str, int) or (kind is list and all(type(token) is int for token in each))
        if not sound or kind is not type(elements[0]):
            return f", all of one kind: prompt.{index} is not"
    return ""


Prompt = Annotated[
    str | ListOf[int] | ListOf[str] | ListOf[ListOf[int]],
    checked_as("must be a text or a list of token ids, or a list of several of these", odd_element),
]
Stop = Annotated[str | ListOf[str] | None, checked_as("must be a text or a list of texts")]
JsonSchema = Annotated[dict[str, Any] | str | None, checked_as("must be a JSON schema, as an object or a text")]
UNSUPPORTED_TEXT = "accepted only with a value that has no effect"


class StructuredOutputs(Body):
    """The form of the output, as vLLM's clients give it; exactly one of the fields."""

    json_: JsonSchema = Field(None, alias="json", description="a JSON schema")
    regex: str | None = Field(None, description="a regular expression, in Rust's syntax")
    choice: ListOf[str] | None = Field(None, description="texts, one of which is the output")
    grammar: str | None = Field(None, description="EBNF, as for Lark or llama.cpp")
    json_object: bool | None = Field(None, description="any JSON object")


class NamedSchema(Body):
    """A JSON schema with a name."""

    name: str | None = Field(None, description="accepted and ignored")
    description: str | None = Field(None, description="accepted and ignored")
    schema_: dict[str, Any] = Field(alias="schema", description="the JSON schema")
    strict: bool | None = Field(None, description="accepted and ignored: the output always obeys the schema")


class ResponseFormat(Body):
    """The form of the output, as OpenAI's clients give it."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="`text` is any text")
    json_schema: NamedSchema | None = Field(None, description="with `type: json_schema`, and only then")


class CommonRequest(Body):
    """The fields that all kinds of requests share: OpenAI's, those that vLLM's clients send, and this server's."""

    model: str | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    seed: int | None = None
    stop: Stop = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: DictOf[float] | None = None
    n: int | None = Field(1, description="independent outputs of a prompt; each takes a place of its own in the server")
    user: str | None = Field(None, description="accepted and ignored")
    response_format: ResponseFormat | None = Field(None, description="the form of the output")
    top_k: int | None = Field(0, description="keep the k most probable tokens; 0 keeps all")
    min_p: float | None = Field(0.0, description="keep tokens this probable relative to the most probable one")
    repetition_penalty: float | None = Field(1.0, description="for tokens in prompt or output; 1 is off")
    min_tokens: int | None = Field(0, description="nothing ends the output before it has this many tokens")
    stop_token_ids: ListOf[int] | None = Field(None, description="tokens that end the output, besides the model's own")
    include_stop_str_in_output: bool | None = Field(
        False, description="the output ends after its stop string, not before it"
    )
    ignore_eos: bool | None = Field(False, description="the model's own stop tokens do not end the output")
    bad_words: ListOf[str] | None = Field(None, description="texts whose tokens never occur in the output")
    structured_outputs: StructuredOutputs | None = Field(None, description="the form of the output")
    guided_json: JsonSchema = Field(None, description="a JSON schema that the output obeys")
    guided_regex: str | None = Field(None, description="a regular expression that the output matches as a whole")
    guided_choice: ListOf[str] | None = Field(None, description="texts, one of which is the output")
    guided_grammar: str | None = Field(None, description="a grammar of the output in EBNF, as for Lark or llama.cpp")
    prompt_logprobs: int | None = Field(
        None, description="give each prompt token's logprob with this many alternatives, at most 20"
    )
    truncate_prompt_tokens: int | None = Field(None, description="read only this many tokens, the last of the prompt")
    skip_special_tokens: bool | None = Field(True, description=UNSUPPORTED_TEXT)
    detokenize: bool | None = Field(True, description=UNSUPPORTED_TEXT)
    priority: int | None = Field(0, description="-100 to 100: waiting requests with a lower number are served earlier")
    cache_salt: str | None = Field(
        None,
        description="KV of equal prefixes is shared with requests of the same salt only; at most 128 characters",
    )
    speculation: Speculation | None = Field(None, description="how it is drafted; by default the server decides")
    return_token_ids: bool = Field(False, description="give token_ids, their origins and texts with each choice")
    timeout_s: float | None = Field(None, description="give up after this many seconds")


class CompletionRequest(CommonRequest):
    """The body of a completion request: OpenAI's fields, then those of this server."""

    prompt: Prompt = Field(description="one prompt or several; each gets its own `n` choices, in order")
    max_tokens: int | None = Field(
        DEFAULT_MAX_TOKENS, description="0 is possible with `echo` or `prompt_logprobs`: the prompt is read, no more"
    )
    echo: bool | None = Field(False, description="the text begins with the prompt, and logprobs with its tokens")
    logprobs: int | None = Field(None, description="give each token's logprob with this many alternatives, at most 20")
    best_of: int | None = Field(1, description=UNSUPPORTED_TEXT)
    suffix: str | None = Field(None, description=UNSUPPORTED_TEXT)
    resume_token_ids: ListOf[int] | None = Field(
        None, description="output tokens that the client already has; they count as output and are not sent again"
    )


UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # by field, the values that have no effect
    "best_of": (None, 1),
    "suffix": (None, ""),
    "skip_special_tokens": (None, True),
    "detokenize": (None, True),
}


def client_requests_from(body: CompletionRequest, defaults: SpeculationSettings, room: int) -> list[ClientRequest]:
    """The service's form of a request: one for each prompt. Raises `InvalidValueError` naming the field.

    More prompts than the service's `room` are refused before a request is made of each.
    """
    asked, prompts = client_request_from(body, defaults), prompts_from(body.prompt)
    check_places(len(prompts), asked.n, room)
    alone = len(prompts) == 1 or not asked.resume
    rule = "cannot be resumed together: resume each completion in a request of its own"
    require(alone, "resume_token_ids", f"{len(prompts)} prompts", rule)
    return [replace(asked, prompt=prompt) for prompt in prompts]


def client_request_from(body: CompletionRequest, defaults: SpeculationSettings) -> ClientRequest:
    """The service's form of the request for the first prompt. Raises `InvalidValueError` naming the field."""
    echoed = body.logprobs if body.echo else None  # the prompt's logprobs come with the echo
    scored = [number for number in (body.prompt_logprobs, echoed) if number is not None]
    return replace(
        common_request_from(body, prompts_from(body.prompt)[0], defaults),
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        resume=tuple(body.resume_token_ids or ()),
        logprobs=body.logprobs,
        prompt_logprobs=max(scored, default=None),
        prompt_scores=sum(1 + number for number in scored),
        echo=bool(body.echo),
    )


def common_request_from(
    body: CommonRequest, prompt: str | tuple[int, ...], defaults: SpeculationSettings
) -> ClientRequest:
    """The service's form of the fields that all kinds of requests share. Raises `InvalidValueError` by field."""
    for name, accepted in UNSUPPORTED.items():
        value = getattr(body, name, None)  # not every kind of request has them all
        rule = f"is not supported: leave it out or set it to {json.dumps(accepted[-1])}"
        require(value in accepted, name, value, rule)
    if body.stream_options is not None:
        require(bool(body.stream), "stream_options", body.stream_options.model_dump(), "needs stream: true")
        padded, rule = body.stream_options.include_obfuscation, "is not supported: leave it out or set it to false"
        require(not padded, "stream_options.include_obfuscation", padded, rule)

    drafter = body.speculation.drafter if body.speculation else None
    check_drafter("speculation.drafter", drafter)
    selector = body.speculation.selector if body.speculation else None
    check_selector("speculation.selector", selector)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    return ClientRequest(
        prompt=prompt,
        sampling=SamplingParams(
            **body.model_dump(include=SAMPLING_FIELDS, exclude_none=True), logit_bias=biases_from(body.logit_bias or {})
        ),
        max_tokens=None,
        seed=body.seed,
        stop=tuple(stop or ()),
        include_stop=bool(body.include_stop_str_in_output),
        model=body.model or "",
        lookaheads=lookaheads_from(body.speculation, defaults),
        timeout_s=body.timeout_s,
        n=1 if body.n is None else body.n,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        bad_words=tuple(body.bad_words or ()),
        guide=guide_from(body),
        prompt_logprobs=body.prompt_logprobs,
        every_prompt_logprobs=True,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        priority=body.priority or 0,
        drafter=drafter,
        selector=selector,
        cache_salt=body.cache_salt or "",
    )


def guide_from(body: CommonRequest) -> Guide | None:
    """The form that the output must have. Raises `InvalidValueError` for more than one."""
    guides = [
        *([response_guide(body.response_format)] if body.response_format else []),
        *(structured_guides(body.structured_outputs) if body.structured_outputs else []),
        guide("json_schema", body.guided_json, "guided_json"),
        guide("regex", body.guided_regex, "guided_regex"),
        guide("choice", body.guided_choice, "guided_choice"),
        guide("grammar", body.guided_grammar, "guided_grammar"),
    ]
    given = [each for each in guides if each is not None]
    if len(given) > 1:
        require(False, given[1].name, "given", f"contradicts {given[0].name}: at most one form can be given")
    return given[0] if given else None


def response_guide(wanted: ResponseFormat) -> Guide | None:
    schema, field = wanted.json_schema, "response_format.json_schema"
    rule = "must be given with type: json_schema, and only then"
    require((schema is not None) == (wanted.type == "json_schema"), field, schema and schema.name, rule)
    if schema is not None:
        return guide("json_schema", schema.schema_, f"{field}.schema")
    return guide("json_object", True, "response_format") if wanted.type == "json_object" else None


def structured_guides(wanted: StructuredOutputs) -> list[Guide | None]:
    guides = [
        guide("json_schema", wanted.json_, "structured_outputs.json"),
        guide("json_object", wanted.json_object, "structured_outputs.json_object"),
        guide("regex", wanted.regex, "structured_outputs.regex"),
        guide("choice", wanted.choice, "structured_outputs.choice"),
        guide("grammar", wanted.grammar, "structured_outputs.grammar"),
    ]
    require(any(guides), "structured_outputs", {}, "must hold one of json, json_object, regex, choice, grammar")
    return guides


def guide(form: str, value: Any, field: str) -> Guide | None:
    """The guide that a field asks for; None if it asks for none."""
    if value is None:
        return None
    if form == "json_schema" and not isinstance(value, str):
        value = json.dumps(value)
    return Guide(form, tuple(value) if form == "choice" else value, field)


def biases_from(logit_bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token in logit_bias:
        number = token.isascii() and token.isdecimal() and len(token) <= 10
        require(number, "logit_bias", token, "is not a token id: must be a whole number in quotes")
    return tuple((int(token), bias) for token, bias in logit_bias.items())


def prompts_from(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | tuple[int, ...]]:
    several = isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)
    prompts: Any = prompt if several else [prompt]
    return [each if isinstance(each, str) else tuple(each) for each in prompts]


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
