"""Translates typed errors to HTTP, in OpenAI's format for errors or, on the paths of its API, in Anthropic's."""

import json
from http import HTTPStatus
from typing import Any, Literal, NamedTuple

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from deploy import calls
from deploy.errors import (
    EngineCrashError,
    EngineLostError,
    OverloadedError,
    SlowBodyError,
    UnauthenticatedError,
    entry_for,
    internal_error,
)
from deploy.no_effect import NO_EFFECT, refusal
from triforce_core.errors import (
    ContextLengthError,
    DeadlineError,
    FingerprintError,
    InvalidValueError,
    TooLargeError,
    TriForceError,
    UnavailableError,
    UnknownModelError,
)

ABSENT = object()  # in place of the value of a field that has none
INVALID, SERVER = "invalid_request_error", "server_error"


class Answer(NamedTuple):
    """How an error is reported over HTTP: its status, and OpenAI's type and code."""

    status: int
    type: str
    code: str


ANSWERS: dict[type[TriForceError], Answer] = {
    InvalidValueError: Answer(400, INVALID, "invalid_value"),
    UnauthenticatedError: Answer(401, INVALID, "invalid_api_key"),
    ContextLengthError: Answer(400, INVALID, "context_length_exceeded"),
    TooLargeError: Answer(413, INVALID, "request_too_large"),
    UnknownModelError: Answer(404, INVALID, "model_not_found"),
    SlowBodyError: Answer(408, INVALID, "request_timeout"),
    OverloadedError: Answer(429, "rate_limit_error", "overloaded"),
    UnavailableError: Answer(503, SERVER, "unavailable"),
    EngineLostError: Answer(503, SERVER, "engine_lost"),
    FingerprintError: Answer(503, SERVER, "fingerprint_changed"),
    EngineCrashError: Answer(500, SERVER, "engine_crash"),
    DeadlineError: Answer(504, "timeout_error", "timeout"),
}
RETRY: dict[int | str, list[tuple[str, str]]] = {  # headers by status, or by code
    # In two lines, because Chromium reads only the first challenge of a line.
    401: [
        ("WWW-Authenticate", "Bearer"),
        ("WWW-Authenticate", 'Basic realm="TriForce: the password is an API key", charset="UTF-8"'),
    ],
    408: [("Connection", "close")],  # the rest of the body is not read
    429: [("Retry-After", str(OverloadedError.retry_after_s))],
    503: [("Retry-After", str(OverloadedError.retry_after_s))],
    "engine_crash": [("x-should-retry", "false")],  # OpenAI's clients would retry, and crash the engine again
    504: [("x-should-retry", "false")],  # OpenAI's clients would retry, and run into the deadline again
}


ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The body of every error response, for the OpenAPI document."""

    error: ErrorDetails


def documented(*statuses: int, body: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """The `responses` argument of a FastAPI route that may answer with these statuses."""
    return {status: {"model": body, "description": HTTPStatus(status).phrase} for status in sorted(statuses)}


class AnthropicErrorDetails(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """The body of every error response on the paths of Anthropic's API, for the OpenAPI document."""

    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str


def is_anthropic(path: str) -> bool:
    return path.startswith("/v1/messages")


def error_body(message: str, answer: Answer, param: str | None = None, path: str = "") -> dict[str, Any]:
    """The body of an error response, in the form of the path's API."""
    if is_anthropic(path):
        kind = ANTHROPIC_TYPES.get(answer.status, "invalid_request_error" if answer.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": calls.current().id}
    return {"error": {"message": message, "type": answer.type, "param": param, "code": answer.code}}


def answer_to(error: Exception, path: str = "") -> tuple[Answer, dict[str, Any]]:
    """The HTTP answer and body for an error. All typed errors are translated here."""
    answer = entry_for(ANSWERS, error)
    if answer is None:
        answer = Answer(500, SERVER, "internal_error")
        return answer, error_body(internal_error(error), answer, path=path)
    param = error.field if isinstance(error, InvalidValueError) else None
    # By these words Claude Code knows that it must shorten the chat.
    too_long = is_anthropic(path) and isinstance(error, ContextLengthError)
    return answer, error_body(f"prompt is too long: {error}" if too_long else str(error), answer, param, path)


class AsciiJSON(JSONResponse):
    """JSON in ASCII, because errors quote the client's input, which may be invalid Unicode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def error_response(error: Exception, path: str = "") -> Response:
    answer, body = answer_to(error, path)
    response = AsciiJSON(body, answer.status)
    for name, value in RETRY.get(answer.code, RETRY.get(answer.status, [])):
        response.headers.append(name, value)
    return response


def malformed_response(error: RequestValidationError, path: str = "") -> Response:
    """The response to a body that breaks the schema: the first error, with field, value and rule."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        field, rule, value = "body", f"is not valid JSON: {first['ctx']['error']}", ABSENT
    elif first["type"] in ("model_attributes_type", "missing") and not place:
        field, rule, value = "body", "must be a JSON object, sent with content-type: application/json", ABSENT
    elif not place:
        field, rule, value = "body", f"is refused: {first['msg']}", ABSENT
    elif first["type"] == "extra_forbidden":
        field, rule, value = ".".join(place), refusal(place[-1]), first["input"]
    elif first["type"] == "missing":
        field, rule, value = ".".join(place), "is required", ABSENT
    else:
        field, value = ".".join(place), first["input"]
        rule = "is refused: " + first["msg"].removeprefix("Value error, ")
    text = f"{field}: {rule}" if value is ABSENT else str(InvalidValueError(field, value, rule))
    code = "malformed_request"
    if first["type"] == "extra_forbidden":
        code = "unsupported_value" if place and place[-1] in NO_EFFECT else "unknown_parameter"
    return AsciiJSON(error_body(text, Answer(400, INVALID, code), field, path), 400)


def http_error_response(error: HTTPException, path: str = "") -> Response:
    """The response to an unknown path or method, and to a body that FastAPI cannot decode."""
    if error.status_code == 400:
        message = "body: must be JSON in UTF-8, of moderate depth and with numbers of moderate length"
        return AsciiJSON(error_body(message, Answer(400, INVALID, "malformed_request"), "body", path), 400)
    phrase = HTTPStatus(error.status_code).phrase.lower()
    answer = Answer(error.status_code, INVALID, phrase.replace(" ", "_"))
    return AsciiJSON(error_body(str(error.detail), answer, path=path), error.status_code, error.headers)
