"""The ingress: both doors in one process, in front of the replicas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from deploy import grpc_api
from deploy.openai_api.routes import http_app
from deploy.replica import RemotePipelines
from deploy.service import ServedModel, Service
from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.config import Settings


class Gateway:
    """Tokenises, admits, and turns tokens back into text.

    The gRPC methods never raise: what is set on the context tells the error. (Serve writes a traceback to the log for
    everything that a method raises, mistakes of clients included. A stream hands its context on with an item only, so
    an error comes after an empty one, which the SDK leaves out.)
    """

    def __init__(self, settings: Settings, pipelines: DeploymentHandle[Any]) -> None:
        self.service = Service(settings, ServedModel.load(settings), RemotePipelines(pipelines))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return http_app(self.service)

    async def drain(self, timeout_s: float) -> bool:
        """For whoever is about to end the application: see `Service.drain`."""
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


def tell(error: Exception, context: RayServegRPCContext) -> None:
    code, details = grpc_api.status_of(error)
    context.set_code(code)
    context.set_details(details)
