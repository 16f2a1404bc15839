"""The ingress: the HTTP and gRPC APIs in one process, in front of the replicas."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest, HealthListResponse
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from deploy import grpc_api
from deploy.calls import Call
from deploy.grpc_gate import host_of
from deploy.grpc_guard import logged, reported, streaming, unary
from deploy.grpc_services import parsed
from deploy.health import Health
from deploy.keys import keys_of
from deploy.openai_api.guard import guarded
from deploy.openai_api.routes import http_app
from deploy.replica import RemotePipelines
from deploy.service import ServedModel, Service
from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.config import Settings


class Gateway:
    """Admits requests, tokenises prompts, and turns output tokens back into text."""

    def __init__(self, settings: Settings, pipelines: DeploymentHandle[Any], why: str = "") -> None:
        """`why`: what the machine means for the placement, for /status; empty if it is not known, as in a cluster."""
        self.service = Service(settings, ServedModel.load(settings), RemotePipelines(pipelines, settings))
        self.service.why = why
        self.health = Health(self.service)
        self.keys = keys_of(settings.server.api_keys)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return guarded(http_app(self.service), self.service, self.keys)

    def __del__(self) -> None:
        """Serve calls it once the last call has ended."""
        if hasattr(self, "service") and self.service.tracing is not None:
            self.service.tracing.close()

    async def drain(self, timeout_s: float) -> bool:
        """Called before the application ends; see `Service.drain`."""
        return await self.service.drain(timeout_s)

    @unary(pb.GenerateRequest, pb.GenerateResponse)
    async def Generate(self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext) -> pb.GenerateResponse:
        return await grpc_api.generate(self.service, request)

    @streaming(pb.GenerateRequest, pb.GenerateChunk)
    async def GenerateStream(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[pb.GenerateChunk, None]:
        async with aclosing(grpc_api.generate_stream(self.service, request)) as chunks:
            async for chunk in chunks:
                yield chunk

    @unary(pb.ListModelsRequest, pb.ListModelsResponse)
    async def ListModels(
        self, request: pb.ListModelsRequest, grpc_context: RayServegRPCContext
    ) -> pb.ListModelsResponse:
        return grpc_api.list_models(self.service)

    @unary(pb.TokenizeRequest, pb.TokenizeResponse)
    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: RayServegRPCContext) -> pb.TokenizeResponse:
        return await grpc_api.tokenize(self.service, request)

    @unary(pb.DetokenizeRequest, pb.DetokenizeResponse)
    async def Detokenize(
        self, request: pb.DetokenizeRequest, grpc_context: RayServegRPCContext
    ) -> pb.DetokenizeResponse:
        return await grpc_api.detokenize(self.service, request)

    # grpc.health.v1 needs no API key.

    async def Check(self, request: bytes, grpc_context: RayServegRPCContext) -> HealthCheckResponse:
        with reported(Call(), grpc_context):
            return await self.health.check(parsed(HealthCheckRequest, request))
        return HealthCheckResponse()

    async def List(self, request: bytes, grpc_context: RayServegRPCContext) -> HealthListResponse:
        with reported(Call(), grpc_context):
            parsed(HealthListRequest, request)
            return await self.health.list()
        return HealthListResponse()

    async def Watch(
        self, request: bytes, grpc_context: RayServegRPCContext
    ) -> AsyncGenerator[HealthCheckResponse, None]:
        # Logged, unlike Check and List, because it stays open for minutes.
        with logged(self, "Watch", grpc_context) as call, reported(call, grpc_context):
            async with aclosing(
                self.health.watch(parsed(HealthCheckRequest, request), host_of(grpc_context))
            ) as statuses:
                async for status in statuses:
                    yield status
            return
        yield HealthCheckResponse()
