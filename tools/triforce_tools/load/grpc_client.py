"""A client of our own generation service over gRPC, with the SDK's messages and errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

import grpc

from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core._gen.triforce.v1.generation_pb2_grpc import GenerationStub
from triforce_core.client.calls import CHANNEL_OPTIONS, authorization
from triforce_core.client.errors import CallError, OverloadedError, from_rpc_error
from triforce_core.client.request import build_request
from triforce_core.client.results import chunk_from_proto, models_from_proto
from triforce_tools.load.answers import FailedError, Piece, Question


class GrpcClient:
    """A client of the service at `address` ("host:port"). Open it with `async with`. It sends the API key of the
    environment, as the SDK does.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._metadata = authorization()

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        self._stub = GenerationStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def models(self) -> list[str]:
        try:
            answer = await self._stub.ListModels(pb.ListModelsRequest(), metadata=self._metadata)
            return [model.id for model in models_from_proto(answer)]
        except grpc.RpcError as error:
            raise failed(from_rpc_error(error)) from None

    async def answer(self, question: Question) -> AsyncGenerator[Piece, None]:
        try:
            request = build_request(
                question.prompt,
                {
                    "model": question.model,
                    "max_tokens": question.max_tokens,
                    "temperature": question.temperature,
                    "seed": question.seed,
                    "priority": question.priority or 0,
                    "lookaheads": question.lookaheads,
                },
            )
        except CallError as error:
            raise failed(error) from None
        call, whole = self._stub.GenerateStream(request, metadata=self._metadata), False
        try:
            async for message in call:
                if message.ByteSize():  # Ray Serve's proxy sends an empty message before an error
                    chunk = chunk_from_proto(message)
                    whole = whole or chunk.usage is not None
                    yield Piece(chunk.text, chunk.usage)
        except grpc.RpcError as error:
            raise failed(from_rpc_error(error)) from None
        finally:
            call.cancel()
        if not whole:
            raise FailedError("cut off", "the stream ended before its last chunk")


def failed(error: CallError) -> FailedError:
    return FailedError(f"gRPC {error.code.name}", str(error), refused=isinstance(error, OverloadedError))
