"""The HTTP application. Its paths and bodies are OpenAI's, except /health and /status, which are for operators."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

import triforce_core
from deploy.openai_api.completion import Completion
from deploy.openai_api.errors import (
    ANSWERS,
    documented,
    error_response,
    http_error_response,
    malformed_response,
)
from deploy.openai_api.requests import CompletionRequest, client_request_from
from deploy.openai_api.streaming import EventStream, with_idle
from deploy.page import add_page
from deploy.service import ServedModel, Service
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.errors import TriForceError, UnavailableError

IDLE_S = 10.0  # an idle stream sends a comment this often, so that clients do not take it for dead


def http_app(service: Service) -> FastAPI:
    """The routes over one service."""
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

    refusals = {answer.status for answer in ANSWERS.values()}

    @app.post("/v1/completions", responses=documented(*refusals, 422, 500))
    async def complete(body: CompletionRequest) -> Response:
        """Completes a prompt, whole or as server-sent events."""
        try:
            completion = Completion(service, body)
            parts = service.complete(client_request_from(body, service.settings.speculation))
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

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """Lists the served model."""
        return {"object": "list", "data": [model_card(service.model)]}

    @app.get("/v1/models/{name:path}", responses=documented(404, 422))
    async def model(name: str) -> dict[str, Any]:
        """Describes the served model, if it has this name."""
        service.check_model(name)
        return model_card(service.model)

    @app.get("/health", responses=documented(503))
    async def health() -> dict[str, str]:
        """Reports whether a request would be served."""
        await service.check()
        return {"status": "ok"}

    @app.get("/status")
    async def status() -> dict[str, Any]:
        """Reports the state of the server and its tiers, even when no tier can serve."""
        try:
            replicas = await service.pipelines.status()
        except UnavailableError:
            replicas = {}
        tiers = [{"replica": name, **tier_status(each)} for name, statuses in replicas.items() for each in statuses]
        target = {"model": service.model.name, "dtype": service.settings.dtype}
        return {"in_flight": service.in_flight, "places": service.room, "target": target, "tiers": tiers}

    add_page(app)
    return app


def model_card(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "triforce",
        "context_length": model.limits.context_length,
    }


def tier_status(status: pb.TierStatus) -> dict[str, Any]:
    links = [{field.name: value for field, value in link.ListFields()} for link in status.links]
    silent = {field.name: value for field, value in status.silent.ListFields()}
    audit = {
        name: getattr(status.audit, name) for name in pb.Audit.DESCRIPTOR.fields_by_name if status.HasField("audit")
    }
    stall = round(status.least_stall_ms, 1)
    kv = {"kv_tokens": status.kv_tokens} if status.tier == "target" else {}
    controller = controller_status(status.controller) if status.HasField("controller") else None
    found = {"silent": silent, "audit": audit, "least_stall_ms": stall, "controller": controller}
    return {
        "tier": status.tier,
        "ready": status.ready,
        "address": status.address or None,
        "live_sequences": status.live_sequences,
        "threads": status.threads or None,
        "links": links,
        **kv,
    } | {name: value for name, value in found.items() if value}


def controller_status(status: pb.ControllerStatus) -> dict[str, Any]:
    return {
        "latest": status.latest,
        "rounds": dict(status.plans),
        "corrections": {kind: round(factor, 3) for kind, factor in status.corrections.items()},
        "acceptance": [
            {field.name: round(getattr(each, field.name), 3) for field in each.DESCRIPTOR.fields}
            for each in status.acceptance
        ],
    }
