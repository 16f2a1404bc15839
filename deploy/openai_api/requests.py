"""The body of a completion request: its schema, and its conversion to the service's request."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from deploy.bounded_json import bounded_dumps
from deploy.client_request import (
    MAX_STOP_STRINGS,
    MAX_WORDS,
    ClientRequest,
    check_drafter,
    check_lookaheads,
    check_places,
)
from deploy.no_effect import without_effect
from triforce_core.config import SELECTOR_NAMES, TIER_SETS, SpeculationSettings, TierSet
from triforce_core.engine.limits import MAX_STOP_TOKENS, check_selector
from triforce_core.errors import require
from triforce_core.messages import MAX_BIASED_TOKENS, UNCHANGED, SamplingParams
from triforce_core.sampling.guides import MAX_CHOICES, Guide

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 2048  # of a body, as at OpenAI's; `check_places` has the limit of the server, which is most often lower
BY_DEFAULT = "by default what the model's generation_config.json says, else"
SAMPLING_FIELDS = {field.name for field in fields(SamplingParams)} - {"logit_bias"}


def checked_as(rule: str, flaw: Callable[[Any], str] = lambda value: "") -> WrapValidator:
    """A validator that reports one error, `rule` and `flaw` of the value, not one for each member of a union."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(rule + flaw(value)) from None

    return WrapValidator(validate)


def at_most(most: int, count: Callable[[Any], int] = len) -> BeforeValidator:
    """A validator that counts the entries of a list or object before one of them is built."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and (found := count(value)) > most:
            raise ValueError(f"has {found} entries, of which at most {most} are allowed")
        return value

    return BeforeValidator(check)


def whole_number(value: Any) -> Any:
    """A float without a fraction as an integer, such as JavaScript's and Lua's clients send."""
    return int(value) if type(value) is float and value.is_integer() else value


@dataclass(unsafe_hash=True)
class AtFirstError(FailFast):
    """A `FailFast` that can be hashed, because typing hashes the members of a union."""


# Lists whose validation ends at the first error. The answer names the first only, and an error takes a thousand bytes
# and more: one for each element of a body would be hundreds of times the body.
T = TypeVar("T")
ListOf = Annotated[list[T], AtFirstError()]
Int = Annotated[int, BeforeValidator(whole_number)]


class Body(BaseModel):
    """A body with exact types: "5" is not accepted for 5.

    Ranges are checked by the service, so that all APIs give the same messages.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    @cache
    def names(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def what_it_asks_for(cls, given: Any) -> Any:
        """The body without fields that ask for nothing, and with one unknown field at most: each would be an error."""
        if not isinstance(given, dict):
            return given
        names = cls.names()
        asking = {name: value for name, value in given.items() if not without_effect(name, value, names)}
        unknown = next((name for name in asking if name not in names), None)
        if unknown is None:
            return asking
        return {name: value for name, value in asking.items() if name in names or name == unknown}


class StreamOptions(Body):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = Field(False, description="with include_usage: usage so far in each chunk")


class Speculation(Body):
    """How this request is drafted, in place of what the server would decide for each round. It changes the speed and
    never the output.
    """

    tiers: TierSet | None = Field(None, description="tiers that take part; `target` alone is plain decoding")
    lookaheads: Annotated[ListOf[int] | None, at_most(2)] = Field(
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
    """The end of an error message that names the first element of a wrong or another kind; empty if there is none."""
    elements = prompt if isinstance(prompt, list) else []
    for index, each in enumerate(elements):
        kind = type(each)
        sound = kind in (str, int) or (kind is list and all(type(token) is int for token in each))
        if not sound or kind is not type(elements[0]):
            return f", all of one kind: prompt.{index} is not"
    return ""


def prompts_in(prompt: list[Any] | dict[str, Any]) -> int:
    return 1 if isinstance(prompt, list) and prompt and type(prompt[0]) is int else len(prompt)


Prompt = Annotated[
    str | ListOf[int] | ListOf[str] | ListOf[ListOf[int]],
    checked_as("must be a text or a list of token ids, or a list of several of these", odd_element),
    at_most(MAX_PROMPTS, prompts_in),
]
Stop = Annotated[str | ListOf[str] | None, checked_as("must be a text or a list of texts"), at_most(MAX_STOP_STRINGS)]
Choice = Annotated[ListOf[str] | None, at_most(MAX_CHOICES)]
JsonSchema = Annotated[dict[str, Any] | str | None, checked_as("must be a JSON schema, as an object or a text")]


class StructuredOutputs(Body):
    """The form of the output, as vLLM's clients give it; exactly one of the fields."""

    json_: JsonSchema = Field(None, alias="json", description="a JSON schema")
    regex: str | None = Field(None, description="a regular expression, in Rust's syntax")
    choice: Choice = Field(None, description="texts, one of which is the output")
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


class AnyRequest(Body):
    """The fields that the requests of all APIs share: OpenAI's and Anthropic's, and this server's."""

    model: str | None = None
    temperature: float | None = Field(None, description=f"0 is greedy; {BY_DEFAULT} 1")
    top_p: float | None = Field(None, description=f"as in OpenAI's API; 0 is greedy; {BY_DEFAULT} 1")
    stream: bool | None = False
    seed: Int | None = None
    top_k: Int | None = Field(None, description=f"keep the k most probable tokens; 0 or -1 keeps all; {BY_DEFAULT} 0")
    min_p: float | None = Field(
        None, description=f"keep tokens this probable relative to the most probable one; {BY_DEFAULT} 0"
    )
    repetition_penalty: float | None = Field(
        None, description=f"for tokens in prompt or output; 1 is off; {BY_DEFAULT} 1"
    )
    priority: Int | None = Field(0, description="-100 to 100: waiting requests with a lower number are served earlier")
    cache_salt: str | None = Field(
        None, description="KV of equal prefixes is shared with requests of the same salt only; at most 128 characters"
    )
    speculation: Speculation | None = Field(None, description="how it is drafted; by default the server decides")
    timeout_s: float | None = Field(None, description="give up after this many seconds")


class CommonRequest(AnyRequest):
    """The fields that completions and chats share: OpenAI's, those that vLLM's clients send, and this server's."""

    stop: Stop = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    logit_bias: Annotated[dict[str, float] | None, at_most(MAX_BIASED_TOKENS)] = None
    n: Int | None = Field(1, description="independent outputs of a prompt; each takes a place of its own in the server")
    response_format: ResponseFormat | None = Field(None, description="the form of the output")
    min_tokens: Int | None = Field(0, description="nothing ends the output before it has this many tokens")
    stop_token_ids: Annotated[ListOf[int] | None, at_most(MAX_STOP_TOKENS)] = Field(
        None, description="tokens that end the output, besides the model's own"
    )
    include_stop_str_in_output: bool | None = Field(
        False, description="the output ends after its stop string, not before it"
    )
    ignore_eos: bool | None = Field(False, description="the model's own stop tokens do not end the output")
    bad_words: Annotated[ListOf[str] | None, at_most(MAX_WORDS)] = Field(
        None, description="texts whose tokens never occur in the output"
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="the form of the output")
    guided_json: JsonSchema = Field(None, description="a JSON schema that the output obeys")
    guided_regex: str | None = Field(None, description="a regular expression that the output matches as a whole")
    guided_choice: Choice = Field(None, description="texts, one of which is the output")
    guided_grammar: str | None = Field(None, description="a grammar of the output in EBNF, as for Lark or llama.cpp")
    return_token_ids: bool = Field(False, description="give token_ids, their origins and texts with each choice")


class CompletionRequest(CommonRequest):
    """The body of a completion request: OpenAI's fields, then those of this server."""

    prompt: Prompt = Field(description="one prompt or several; each gets its own `n` choices, in order")
    max_tokens: Int | None = Field(
        DEFAULT_MAX_TOKENS, description="0 is possible with `echo` or `prompt_logprobs`: the prompt is read, no more"
    )
    echo: bool | None = Field(False, description="the text begins with the prompt, and logprobs with its tokens")
    logprobs: Int | None = Field(None, description="give each token's logprob with this many alternatives, at most 20")
    prompt_logprobs: Int | None = Field(
        None, description="give each prompt token's logprob with this many alternatives, at most 20"
    )
    truncate_prompt_tokens: Int | None = Field(None, description="read only this many tokens, the last of the prompt")
    resume_token_ids: ListOf[int] | None = Field(
        None, description="output tokens that the client already has; they count as output and are not sent again"
    )


def client_requests_from(
    body: CompletionRequest, defaults: SpeculationSettings, room: int, sampling: SamplingParams = UNCHANGED
) -> list[ClientRequest]:
    """The service's form of a request, for each prompt, at most `room`. Raises `InvalidValueError` by field."""
    asked, prompts = client_request_from(body, defaults, sampling), prompts_from(body.prompt)
    check_places(len(prompts), asked.n, room)
    alone = len(prompts) == 1 or not asked.resume
    rule = "cannot be resumed together: resume each completion in a request of its own"
    require(alone, "resume_token_ids", f"{len(prompts)} prompts", rule)
    return [replace(asked, prompt=prompt) for prompt in prompts]


def client_request_from(
    body: CompletionRequest, defaults: SpeculationSettings, sampling: SamplingParams
) -> ClientRequest:
    """The service's form of the request for the first prompt. Raises `InvalidValueError` naming the field."""
    echoed = body.logprobs if body.echo else None  # the prompt's logprobs come with the echo
    scored = [number for number in (body.prompt_logprobs, echoed) if number is not None]
    return replace(
        common_request_from(body, prompts_from(body.prompt)[0], defaults, sampling),
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        resume=tuple(body.resume_token_ids or ()),
        logprobs=body.logprobs,
        prompt_logprobs=max(scored, default=None),
        every_prompt_logprobs=True,
        prompt_scores=sum(1 + number for number in scored),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        echo=bool(body.echo),
    )


def common_request_from(
    body: CommonRequest, prompt: str | tuple[int, ...], defaults: SpeculationSettings, sampling: SamplingParams
) -> ClientRequest:
    """The service's form of the fields that all kinds of requests share. `sampling`: where the body does not say.

    Raises `InvalidValueError` by field.
    """
    if body.stream_options is not None:
        require(bool(body.stream), "stream_options", body.stream_options.model_dump(), "needs stream: true")

    drafter = body.speculation.drafter if body.speculation else None
    check_drafter("speculation.drafter", drafter)
    selector = body.speculation.selector if body.speculation else None
    check_selector("speculation.selector", selector)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    stated = body.model_dump(include=SAMPLING_FIELDS, exclude_none=True)
    if body.top_p == 0:  # the most probable token alone
        stated |= {"temperature": 0.0, "top_p": 1.0}
    if body.top_k == -1:  # as vLLM's clients say that all tokens are kept
        stated |= {"top_k": 0}
    return ClientRequest(
        prompt=prompt,
        sampling=replace(sampling, **stated, logit_bias=biases_from(body.logit_bias or {})),
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
        priority=body.priority or 0,
        drafter=drafter,
        selector=selector,
        cache_salt=body.cache_salt or "",
        progress=bool(body.stream and body.return_token_ids),
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
        value = bounded_dumps(value, field)
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
    """The lookaheads of a request, the settings' if it only names the tiers that draft; None if it sets none."""
    if speculation is None or (speculation.tiers is None and speculation.lookaheads is None):
        return None
    lookaheads = defaults.lookaheads if speculation.lookaheads is None else speculation.lookaheads
    check_lookaheads("speculation.lookaheads", lookaheads)
    takes_part = TIER_SETS[speculation.tiers] if speculation.tiers else (True, True)
    return tuple(n * part for n, part in zip(lookaheads, takes_part, strict=True))
