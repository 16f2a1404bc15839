"""OpenAI's routes that this server does not have: they are refused by name."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from deploy.openai_api.errors import INVALID, Answer, AsciiJSON, error_body


def unsupported_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.post("/v1/responses")
    @router.post("/v1/embeddings")
    async def refuse(request: Request) -> Response:
        message = f"{request.url.path} is not supported by this server; {request.app.url_path_for('complete')} is"
        return AsciiJSON(error_body(message, Answer(404, INVALID, "unsupported_route")), 404)

    return router
