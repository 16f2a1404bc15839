"""The routes for operators: whether the server can serve, what it does, and its metrics."""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

import triforce_core
from deploy.openai_api.errors import documented
from deploy.service import Service
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.errors import UnavailableError


def operator_routes(service: Service) -> APIRouter:
    app = APIRouter()

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses=documented(503))
    async def health() -> dict[str, str]:
        """Reports whether a request would be served."""
        await service.check()
        return {"status": "ok"}

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", responses=documented(503))
    async def ready() -> dict[str, str]:
        """Reports whether the server takes requests and a pipeline can serve them; decodes nothing."""
        await service.ready()
        return {"status": "ok"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Tells the version of the server, and the fingerprint of what determines its tokens."""
        return {"version": triforce_core.__version__, "system_fingerprint": service.model.fingerprint}

    @app.get("/status")
    async def status() -> dict[str, Any]:
        """Reports the state of the server and its tiers, even when no tier can serve."""
        try:
            replicas = await service.pipelines.status()
        except UnavailableError:
            replicas = {}
        tiers = [{"replica": name, **tier_status(each)} for name, statuses in replicas.items() for each in statuses]
        where: dict[str, str] = {"colocate": service.settings.placement.colocate}
        if service.why:
            where["why"] = service.why
        target = {"model": service.model.name, "dtype": service.settings.dtype}
        if service.model.lossy is not None:
            target["lossy"] = service.model.lossy
        served = {"in_flight": service.in_flight, "places": service.room}
        return served | {"target": target, "placement": where, "tiers": tiers}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """The metrics of the server and its tiers, in Prometheus' text format."""
        return Response(await service.scrape.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return app


def tier_status(status: pb.TierStatus) -> dict[str, Any]:
    links = [{field.name: value for field, value in link.ListFields()} for link in status.links]
    silent = {field.name: value for field, value in status.silent.ListFields()}
    audit = {
        name: getattr(status.audit, name) for name in pb.Audit.DESCRIPTOR.fields_by_name if status.HasField("audit")
    }
    stall = round(status.least_stall_ms, 1)
    kv = kv_status(status) if status.tier == "target" else {}
    controller = controller_status(status.controller) if status.HasField("controller") else None
    kernels = {"fused": status.kernels.fused, "shapes": status.kernels.shapes} if status.HasField("kernels") else {}
    found = {
        "kernels": kernels,
        "fingerprint": status.fingerprint,
        "inexact": status.inexact,
        "silent": silent,
        "audit": audit,
        "least_stall_ms": stall,
        "controller": controller,
        "restarts": status.restarts,
    }
    return {
        "tier": status.tier,
        "ready": status.ready,
        "address": status.address or None,
        "live_sequences": status.live_sequences,
        "threads": status.threads or None,
        "links": links,
        **kv,
    } | {name: value for name, value in found.items() if value}


def kv_status(status: pb.TierStatus) -> dict[str, Any]:
    """The target's pool: tokens that requests use, and what is kept for later requests with the same prefix."""
    prefixes = {
        "hit_tokens": status.totals.prefix_hit_tokens,
        "miss_tokens": status.totals.prefix_miss_tokens,
        "kept_tokens": status.kept_tokens,
        "dropped_tokens": status.dropped_tokens,
    }
    return {"kv_tokens": status.kv_tokens, "prefixes": prefixes}


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
