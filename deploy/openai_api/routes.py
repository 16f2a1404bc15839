"""The HTTP application: the routes of OpenAI's API, those of vLLM that its users send to, and those for operators."""

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

import triforce_core
from deploy.anthropic_api.routes import anthropic_routes
from deploy.openai_api.chat import chat_routes
from deploy.openai_api.completion import completions
from deploy.openai_api.document import describe
from deploy.openai_api.errors import (
    ANSWERS,
    INVALID,
    Answer,
    AsciiJSON,
    documented,
    error_body,
    error_response,
    http_error_response,
    malformed_response,
)
from deploy.openai_api.large import LargeBodyRoute
from deploy.openai_api.logprobs import TokenStrings
from deploy.openai_api.operators import operator_routes
from deploy.openai_api.requests import CompletionRequest, client_requests_from
from deploy.openai_api.streaming import WHOLE_OR_EVENTS, sent
from deploy.openai_api.tokens import token_routes
from deploy.page import add_page
from deploy.responses_api.routes import response_routes
from deploy.service import ServedModel, Service
from triforce_core.errors import TriForceError


def http_app(service: Service) -> FastAPI:
    """The routes over one service."""
    # FastAPI's own pages of the document load scripts from elsewhere; `describe` adds one that does not.
    app = App(title="TriForce Serve", version=triforce_core.__version__, docs_url=None, redoc_url=None)
    app.router.route_class = LargeBodyRoute
    strings = TokenStrings()

    @app.exception_handler(TriForceError)
    async def refuse(request: Request, error: TriForceError) -> Response:
        return error_response(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def refuse_shape(request: Request, error: RequestValidationError) -> Response:
        return malformed_response(error, request.url.path)

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        return http_error_response(error, request.url.path)

    refusals = {answer.status for answer in ANSWERS.values()}

    @app.post("/v1/completions", responses=WHOLE_OR_EVENTS | documented(*refusals, 500))
    async def complete(body: CompletionRequest) -> Response:
        """Completes one prompt or several, whole or as server-sent events."""
        try:
            defaults = service.settings.speculation, service.room, service.model.sampling
            asked = client_requests_from(body, *defaults)
            if body.logprobs is not None or body.prompt_logprobs is not None:
                await strings.load(service.model)
            answers = completions(service, body, strings, asked)
            return await sent(answers, service.complete(*asked), stream=body.stream)
        except Exception as error:
            return error_response(error)

    @app.get("/v1/models")
    async def models(after_id: str | None = None, before_id: str | None = None) -> dict[str, Any]:
        """Lists the served model, with the fields of OpenAI's API and of Anthropic's. No page comes before or after."""
        # Anthropic's SDK before 0.46 asks for pages until one is empty.
        name = service.model.name if after_id is None and before_id is None else None
        listed = [] if name is None else [model_card(service.model)]
        return {"object": "list", "data": listed, "has_more": False, "first_id": name, "last_id": name}

    @app.get("/v1/models/{name:path}", responses=documented(404))
    async def model(name: str) -> dict[str, Any]:
        """Describes the served model, if it has this name."""
        service.check_model(name)
        return model_card(service.model)

    app.include_router(operator_routes(service))
    app.include_router(chat_routes(service, strings))
    app.include_router(response_routes(service))
    app.include_router(anthropic_routes(service))
    app.include_router(token_routes(service))

    @app.post("/v1/embeddings", include_in_schema=False)
    async def unsupported(request: Request) -> Response:
        message = f"{request.url.path} is not supported by this server; {app.url_path_for('complete')} is"
        return AsciiJSON(error_body(message, Answer(404, INVALID, "unsupported_route")), 404)

    add_page(app)
    describe(app)
    return app


class App(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """The document without 422, which FastAPI gives to malformed bodies: they get 400 here, as from OpenAI."""
        document = super().openapi()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for schema in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(schema, None)
        return document


def model_card(model: ServedModel) -> dict[str, Any]:
    lossy = {} if model.lossy is None else {"lossy": model.lossy}
    return lossy | {
        "id": model.name,
        "object": "model",
        "type": "model",
        "display_name": model.name,
        "created": model.created,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "owned_by": "triforce",
        "context_length": model.limits.context_length,
        "max_model_len": model.limits.context_length,
        "chats": bool(model.tokenizer.chat_template),  # has a template of its own
    }
