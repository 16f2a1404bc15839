"""The asynchronous client: the calls of `TriForceClient` over `grpc.aio`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self, Unpack

import grpc

from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.client.calls import CHANNEL_OPTIONS, GENERATION, Call, Client, Result
from triforce_core.client.errors import CUT_OFF, broken_off, client_closed, from_rpc_error, typed_if
from triforce_core.client.progress import Progress
from triforce_core.client.request import CallArguments, Message, chat_messages
from triforce_core.client.results import Chunk, Completion, Model

StreamingCall = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateChunk]


class AsyncTriForceClient(Client):
    """A client for asyncio. Make it inside a running event loop, and use it in that loop alone. Its methods are those
    of `TriForceClient`; `stream` and `stream_chat` are called without `await`, and give streams for `async for`.
    """

    def __init__(self, address: str = "127.0.0.1:9000", **settings: Any) -> None:
        super().__init__(address, **settings)
        self._closed = asyncio.Event()
        self._channel = (
            grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
            if self._credentials is None
            else grpc.aio.secure_channel(address, self._credentials, options=CHANNEL_OPTIONS)
        )

    async def generate(self, prompt: str | Sequence[int], **arguments: Unpack[CallArguments]) -> Completion:
        """As `TriForceClient.generate`."""
        return await self._call(self._generate_call(prompt, arguments))

    def stream(self, prompt: str | Sequence[int], **arguments: Unpack[CallArguments]) -> AsyncChunkStream:
        """As `TriForceClient.stream`."""
        return self._stream(self._progress(prompt, arguments))

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Unpack[CallArguments],
    ) -> Completion:
        """As `TriForceClient.chat`."""
        return await self._call(self._generate_call(chat_messages(messages, tools), arguments))

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Unpack[CallArguments],
    ) -> AsyncChunkStream:
        """As `TriForceClient.stream_chat`."""
        return self._stream(self._progress(chat_messages(messages, tools), arguments))

    async def tokenize(
        self, prompt: str | Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, model: str = ""
    ) -> tuple[int, ...]:
        """As `TriForceClient.tokenize`."""
        return await self._call(self._tokenize_call(prompt, tools, model))

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """As `TriForceClient.detokenize`."""
        return await self._call(self._detokenize_call(token_ids, model))

    async def models(self) -> tuple[Model, ...]:
        """As `TriForceClient.models`."""
        return await self._call(self._models_call())

    async def health(self, timeout_s: float = 10.0) -> bool:
        """As `TriForceClient.health`."""
        return await self._call(self._health_call(timeout_s), retries=0)

    async def close(self) -> None:
        """End the connection and every call on it, which raise `CallCancelledError`, as all later ones do."""
        self._closed.set()
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _call(self, call: Call[Result], retries: int | None = None) -> Result:
        method = self._channel.unary_unary(
            call.path, type(call.request).SerializeToString, response_deserializer=call.answer.FromString
        )
        attempts = self._attempts(call.timeout_s, retries)
        while True:
            try:
                with typed_if(self._closed.is_set):
                    answer = await method(call.request, timeout=attempts.left_s, metadata=self._metadata)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                delay_s = attempts.delay_s(failure)
                if delay_s is None:
                    raise failure from error
                with suppress(TimeoutError):  # the next attempt raises where the client is closed
                    await asyncio.wait_for(self._closed.wait(), delay_s)
            except asyncio.CancelledError:
                raise_if_channel_closed()
                raise
            else:
                return call.result(answer)

    def _stream(self, progress: Progress) -> AsyncChunkStream:
        method = self._channel.unary_stream(
            f"{GENERATION}/GenerateStream",
            pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateChunk.FromString,
        )
        metadata, closed = self._metadata, self._closed.is_set

        def start() -> StreamingCall:
            with typed_if(closed):
                return method(progress.request, timeout=progress.attempts.left_s, metadata=metadata)

        return AsyncChunkStream(progress, start)


class AsyncChunkStream(AsyncIterator[Chunk]):
    """As `ChunkStream`, for `async for` and `async with`."""

    def __init__(self, progress: Progress, start: Callable[[], StreamingCall]) -> None:
        self._progress, self._start = progress, start
        self._closed = asyncio.Event()
        self._call = start()

    async def __anext__(self) -> Chunk:
        while not self._closed.is_set():
            try:
                message = await self._call.read()
            except grpc.RpcError as error:
                if self._closed.is_set() or self._progress.ended:
                    break
                await self._resume(error)
            except asyncio.CancelledError:
                if being_cancelled():
                    raise
                if self._closed.is_set():
                    break
                if CUT_OFF[grpc.StatusCode.CANCELLED] not in (await self._call.details() or ""):
                    raise client_closed() from None
                if self._progress.ended:
                    break
                await self._resume(None)
            else:
                if not isinstance(message, pb.GenerateChunk):  # the end
                    if self._closed.is_set() or self._progress.ended:
                        break
                    await self._resume(None)
                    continue
                chunk = self._progress.take(message)
                if chunk is not None:
                    return chunk
        raise StopAsyncIteration

    async def _resume(self, error: grpc.RpcError | None) -> None:
        """Go on in another call after a delay; None: this one ended too soon. Raises `CallError` if it cannot."""
        failure = broken_off() if error is None else from_rpc_error(error)
        delay_s = self._progress.delay_s(failure)
        if delay_s is None:
            raise failure from error
        try:
            await asyncio.wait_for(self._closed.wait(), delay_s)
        except TimeoutError:
            self._progress.prepare()
            self._call = self._start()

    def close(self) -> None:
        self._closed.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()


def being_cancelled() -> bool:
    """Whether someone cancels the current task, so that an `asyncio.CancelledError` is not gRPC's own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def raise_if_channel_closed() -> None:
    """gRPC ends a call whose channel is closed with `asyncio.CancelledError`, though nobody cancels the task."""
    if not being_cancelled():
        raise client_closed() from None
