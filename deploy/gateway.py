"""The ingress: the HTTP and gRPC APIs in one process, in front of the replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest, HealthListResponse
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from deploy import grpc_api
from deploy.health import Health
from deploy.openai_api.routes import http_app
from deploy.replica import RemotePipelines
from deploy.service import ServedModel, Service
from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.config import Settings


class Gateway:
    """Admits requests, tokenises prompts, and turns output tokens back into text.

    The gRPC methods never raise but report errors through the context, because Serve logs a traceback for everything
    that a method raises, even for mistakes of clients. A stream passes its context on only with an item, so an error
    follows an empty chunk, which the SDK skips.
    """

    def __init__(self, settings: Settings, pipelines: DeploymentHandle[Any]) -> None:
        self.service = Service(settings, ServedModel.load(settings), RemotePipelines(pipelines))
        self.health = Health(self.service)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return http_app(self.service)

    async def drain(self, timeout_s: float) -> bool:
        """Called before the application ends; see `Service.drain`."""
        return await self.service.drain(timeout_s)

    async def Generate(self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext) -> pb.GenerateResponse:
        try:
            return await grpc_api.generate(self.service, request)
        except Exception as error:
            tell(error, grpc_context)
            return pb.GenerateResponse()

    async def GenerateStream(
        self, request: pb.GenerateRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.GenerateChunk]:
        try:
            async with aclosing(grpc_api.generate_stream(self.service, request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except Exception as error:
            tell(error, grpc_context)
            yield pb.GenerateChunk()

    async def ListModels(self, request: pb.ListModelsRequest) -> pb.ListModelsResponse:
        return grpc_api.list_models(self.service)

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: RayServegRPCContext) -> pb.TokenizeResponse:
        try:
            return await grpc_api.tokenize(self.service, request)
        except Exception as error:
            tell(error, grpc_context)
            return pb.TokenizeResponse()

    async def Detokenize(
        self, request: pb.DetokenizeRequest, grpc_context: RayServegRPCContext
    ) -> pb.DetokenizeResponse:
        try:
            return await grpc_api.detokenize(self.service, request)
        except Exception as error:
            tell(error, grpc_context)
            return pb.DetokenizeResponse()

    async def Check(self, request: HealthCheckRequest, grpc_context: RayServegRPCContext) -> HealthCheckResponse:
        """Of grpc.health.v1, as `List` and `Watch`: needs no API key."""
        try:
            return await self.health.check(request)
        except Exception as error:
            tell(error, grpc_context)
            return HealthCheckResponse()

    async def List(self, request: HealthListRequest) -> HealthListResponse:
        return await self.health.list()

    async def Watch(
        self, request: HealthCheckRequest, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[HealthCheckResponse]:
        try:
            async with aclosing(self.health.watch(request)) as statuses:
                async for status in statuses:
                    yield status
        except Exception as error:
            tell(error, grpc_context)
            yield HealthCheckResponse()


def tell(error: Exception, context: RayServegRPCContext) -> None:
    code, details = grpc_api.status_of(error)
    context.set_code(code)
    context.set_details(details)
