"""The HTTP door: OpenAI's completions API over `Service`, server-sent events, and every error in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import triforce_core
from deploy.errors import DeadlineError, OverloadedError, entry_for, internal_error
from deploy.service import Ask, Done, Part, Service, check_lookaheads
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.config import TIER_SETS, SpeculationSettings, TierSet
from triforce_core.errors import (
    InvalidValueError,
    TooLargeError,
    TriForceError,
    UnavailableError,
    UnknownModelError,
    require,
)
from triforce_core.messages import SamplingParams, Tier
from triforce_core.text import Piece

DEFAULT_MAX_TOKENS = 16  # OpenAI's
IDLE_S = 10.0  # a stream that has nothing to say sends a comment this often, so that nobody takes it for dead
INVALID, SERVER = "invalid_request_error", "server_error"
T = TypeVar("T")

# -- errors ------------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """How HTTP tells an error."""

    status: int
    type: str
    code: str


ANSWERS: dict[type[TriForceError], Answer] = {
    InvalidValueError: Answer(400, INVALID, "invalid_value"),
    TooLargeError: Answer(413, INVALID, "context_length_exceeded"),
    UnknownModelError: Answer(404, INVALID, "model_not_found"),
    OverloadedError: Answer(429, "rate_limit_error", "overloaded"),
    UnavailableError: Answer(503, SERVER, "unavailable"),
    DeadlineError: Answer(504, "timeout_error", "timeout"),
}
MALFORMED = {"json_invalid": 400}  # what is wrong with a body by itself; all else about its shape is 422


def error_body(message: str, answer: Answer, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": answer.type, "param": param, "code": answer.code}}


def answer_to(error: Exception) -> tuple[Answer, dict[str, Any]]:
    """The one translation from error to HTTP."""
    answer = entry_for(ANSWERS, error)
    if answer is None:
        answer = Answer(500, SERVER, "internal_error")
        return answer, error_body(internal_error(error), answer)
    param = error.field if isinstance(error, InvalidValueError) else None
    return answer, error_body(str(error), answer, param)


class AsciiJSON(JSONResponse):
    """Errors quote what they were given, which may be no valid Unicode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def error_response(error: Exception) -> Response:
    answer, body = answer_to(error)
    headers = {"Retry-After": str(OverloadedError.retry_after_s)} if answer.status in (429, 503) else None
    return AsciiJSON(body, answer.status, headers)


def malformed_response(error: RequestValidationError) -> Response:
    """A body that is not what the schema says: the first complaint, with field, value and rule."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        field, rule, value = "body", f"is not valid JSON: {first['ctx']['error']}", None
    elif first["type"] in ("model_attributes_type", "missing") and not path:
        field, rule, value = "body", "must be a JSON object, sent with content-type: application/json", None
    elif not path:
        field, rule, value = "body", f"is refused: {first['msg']}", None
    elif first["type"] == "extra_forbidden":
        field, rule, value = ".".join(path), "is not a field of this request", first["input"]
    elif first["type"] == "missing":
        field, rule, value = ".".join(path), "is required", None
    else:
        field, value = ".".join(path), first["input"]
        rule = "is refused: " + first["msg"].removeprefix("Value error, ")
    status = MALFORMED.get(first["type"], 422)
    text = f"{field}: {rule}" if value is None else str(InvalidValueError(field, value, rule))
    return AsciiJSON(error_body(text, Answer(status, INVALID, "malformed_request"), field), status)


def http_error_response(error: HTTPException) -> Response:
    """Unknown paths and methods."""
    phrase = HTTPStatus(error.status_code).phrase.lower()
    answer = Answer(error.status_code, INVALID, phrase.replace(" ", "_"))
    return AsciiJSON(error_body(str(error.detail), answer), error.status_code, error.headers)


# -- requests ----------------------------------------------------------------------------------------------------------


def checked_as(rule: str) -> WrapValidator:
    """Say `rule` where a union would list what is wrong with each of its members."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(rule) from None

    return WrapValidator(validate)


class Body(BaseModel):
    """Types are exact: no "5" for 5. Ranges are checked further in, with the same words for every door."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool = False


class Speculation(Body):
    """Which tiers draft for this request, and how far. It changes the speed and never the output."""

    tiers: TierSet | None = None
    lookaheads: list[int] | None = Field(
        None, description="tokens drafted by the retrieval tier, and by the draft tier"
    )


Prompt = Annotated[
    str | list[int] | list[str] | list[list[int]],
    checked_as("must be a text or a list of token ids, or a list that holds one of these"),
]
Stop = Annotated[str | list[str] | None, checked_as("must be a text or a list of texts")]


class CompletionRequest(Body):
    """OpenAI's fields, and after them those of this server."""

    model: str | None = None
    prompt: Prompt
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    seed: int | None = None
    stop: Stop = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="accepted and ignored")
    # Known, and only accepted with the value that leaves them out.
    n: int | None = 1
    best_of: int | None = 1
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    # Beyond OpenAI's.
    top_k: int | None = Field(0, description="keep the k most probable tokens; 0 keeps all")
    min_p: float | None = Field(0.0, description="keep tokens this probable relative to the most probable one")
    speculation: Speculation | None = None
    return_token_ids: bool = Field(False, description="give token_ids and their origins with each choice")
    timeout_s: float | None = Field(None, description="give up after this many seconds")


UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # field: the values that ask for nothing
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None,),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
}


def ask_from(body: CompletionRequest, defaults: SpeculationSettings) -> Ask:
    """Raises `InvalidValueError` naming the field."""
    for name, accepted in UNSUPPORTED.items():
        value = getattr(body, name)
        rule = f"is not supported: leave it out or set it to {json.dumps(accepted[-1])}"
        require(value in accepted, name, value, rule)
    if body.stream_options is not None:
        require(bool(body.stream), "stream_options", body.stream_options.model_dump(), "needs stream: true")

    def given(value: T | None, default: T) -> T:
        return default if value is None else value

    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    return Ask(
        prompt=prompt_from(body.prompt),
        sampling=SamplingParams(
            temperature=given(body.temperature, 1.0),
            top_k=given(body.top_k, 0),
            top_p=given(body.top_p, 1.0),
            min_p=given(body.min_p, 0.0),
        ),
        max_tokens=given(body.max_tokens, DEFAULT_MAX_TOKENS),
        seed=body.seed,
        stop=tuple(stop or ()),
        model=body.model or "",
        lookaheads=lookaheads_from(body.speculation, defaults),
        timeout_s=body.timeout_s,
    )


def prompt_from(prompt: str | list[int] | list[str] | list[list[int]]) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        counted = f"{len(prompt)} prompts"
        require(len(prompt) == 1, "prompt", counted, "must be one prompt: send each in a request of its own")
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else tuple(prompt)  # type: ignore[arg-type]


def lookaheads_from(speculation: Speculation | None, defaults: SpeculationSettings) -> tuple[int, ...] | None:
    """Those of a request; where it only says which tiers take part, they look as far ahead as the settings say."""
    if speculation is None or (speculation.tiers is None and speculation.lookaheads is None):
        return None
    lookaheads = speculation.lookaheads or defaults.lookaheads
    check_lookaheads("speculation.lookaheads", lookaheads)
    takes_part = TIER_SETS[speculation.tiers] if speculation.tiers else (True, True)
    return tuple(n * part for n, part in zip(lookaheads, takes_part, strict=True))


# -- responses ---------------------------------------------------------------------------------------------------------


class Completion:
    """One completion in OpenAI's words."""

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        self.body = body
        self.frame = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model.name,
            "system_fingerprint": service.model.fingerprint,
        }

    def of(self, part: Part) -> dict[str, Any]:
        """A chunk, or the whole when there is but one part."""
        choice = {
            "index": 0,
            "text": part.piece.text,
            "logprobs": None,
            "finish_reason": part.done and part.done.finish_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = part.piece.tokens
            choice["origins"] = [Tier(origin).name.lower() for origin in part.piece.origins]
        return {**self.frame, "choices": [choice], **({"triforce": extras(part, part.done)} if part.done else {})}

    async def whole(self, parts: AsyncGenerator[Part, None]) -> dict[str, Any]:
        pieces = []
        async with aclosing(parts):
            async for part in parts:
                pieces.append(part.piece)
        return {**self.of(replace(part, piece=joined(pieces))), "usage": usage(part)}

    async def events(self, first: Part | None, rest: AsyncGenerator[Part | None, None]) -> AsyncGenerator[str, None]:
        """Server-sent events: a chunk for each part that says something, a comment for each None."""
        with_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        try:
            part = first
            while part is None or part.done is None:
                if part is None:
                    yield ": waiting\n\n"
                elif part.piece.text or self.body.return_token_ids:
                    yield event({**self.of(part), **({"usage": None} if with_usage else {})})
                part = await anext(rest)
            yield event({**self.of(part), **({"usage": None} if with_usage else {})})
            if with_usage:
                yield event({**self.frame, "choices": [], "usage": usage(part)})
            yield "data: [DONE]\n\n"
        except Exception as error:  # the status is sent: an error is an event
            yield event(answer_to(error)[1])


def joined(pieces: list[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        b"".join(piece.origins for piece in pieces),
    )


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


def usage(part: Part) -> dict[str, int]:
    assert part.done is not None
    completion_tokens = part.done.completion_tokens
    return {
        "prompt_tokens": part.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": part.prompt_tokens + completion_tokens,
    }


def extras(part: Part, done: Done) -> dict[str, Any]:
    """What OpenAI does not tell: how the output was made, and the seed that makes it again."""
    stats = done.stats
    return {
        "seed": part.seed,
        "queued_s": stats.queued_s,
        "prefill_s": stats.prefill_s,
        "ms_per_token": stats.ms_per_token,
        "tokens_per_round": stats.tokens_per_round,
        "acceptance": stats.acceptance,
        "snapshots": stats.snapshots,
    }


def tier_status(status: pb.TierStatus) -> dict[str, Any]:
    links = [{field.name: value for field, value in link.ListFields()} for link in status.links]
    return {"tier": status.tier, "ready": status.ready, "live_sequences": status.live_sequences, "links": links}


class EventStream(StreamingResponse):
    """Server-sent events; however the response ends, `source` is closed."""

    def __init__(self, events: AsyncGenerator[str, None], source: AsyncGenerator[Any, None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self.source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.source.aclose()


async def with_idle(source: AsyncGenerator[T, None], idle_s: float) -> AsyncGenerator[T | None, None]:
    """The items of `source`, and None whenever none came for `idle_s` seconds."""
    async with aclosing(source):
        while True:
            coming = asyncio.ensure_future(anext(source))
            try:
                while not (await asyncio.wait({coming}, timeout=idle_s))[0]:
                    yield None
            finally:
                if not coming.done():
                    coming.cancel()
                    await asyncio.wait({coming})
            try:
                item = coming.result()
            except StopAsyncIteration:
                return
            yield item


# -- the application ---------------------------------------------------------------------------------------------------


def http_app(service: Service) -> FastAPI:
    """The routes. Paths and bodies are OpenAI's; /health and /status are for operators."""
    app = FastAPI(title="TriForce Serve", version=triforce_core.__version__)

    @app.exception_handler(TriForceError)
    async def refuse(_: Request, error: TriForceError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def refuse_shape(_: Request, error: RequestValidationError) -> Response:
        return malformed_response(error)

    @app.exception_handler(HTTPException)
    async def refuse_path(_: Request, error: HTTPException) -> Response:
        return http_error_response(error)

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest) -> Response:
        try:
            completion = Completion(service, body)
            parts = service.complete(ask_from(body, service.settings.speculation))
            if not body.stream:
                return JSONResponse(await completion.whole(parts))
            paced = with_idle(parts, IDLE_S)
            try:
                first = await anext(paced)
            except BaseException:
                await paced.aclose()
                raise
            return EventStream(completion.events(first, paced), source=paced)
        except Exception as error:
            return error_response(error)

    def model_card() -> dict[str, Any]:
        model = service.model
        context = model.limits.context_length
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "triforce",
            "context_length": context,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model_card()

    @app.get("/health")
    async def health() -> dict[str, str]:
        await service.pipelines.check()
        return {"status": "ok"}

    @app.get("/status")
    async def status() -> dict[str, Any]:
        tiers = [tier_status(each) for each in await service.pipelines.status()]
        return {"in_flight": service.in_flight, "places": service.room, "tiers": tiers}

    return app
