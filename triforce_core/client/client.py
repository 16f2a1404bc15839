"""The client: one channel to a deployment, blocking calls, typed results and errors. Safe to share between threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, Unpack

import grpc

from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core._gen.triforce.v1.generation_pb2_grpc import GenerationStub
from triforce_core.client.errors import from_rpc_error
from triforce_core.client.request import MAX_MESSAGE_BYTES, CallArguments, build_request
from triforce_core.client.results import (
    Chunk,
    Completion,
    Model,
    chunk_from_proto,
    completion_from_proto,
    models_from_proto,
)

CHANNEL_OPTIONS = (
    # Reconnects within seconds after a deployment is back; gRPC's default backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)


class TriForceClient:
    """A client of the generation service at `address` ("host:port").

    `timeout_s` bounds every call, and a stream as a whole, unless the call has its own `timeout_s`; None means no
    limit. `application` is the name of the Ray Serve application, needed where the proxy serves several; `metadata` is
    sent with every call. Calls raise `CallError`s (`triforce_core.client.errors`).
    """

    def __init__(
        self,
        address: str = "127.0.0.1:9000",
        *,
        timeout_s: float | None = 600.0,
        application: str | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.timeout_s = timeout_s
        self._metadata = (*metadata, *([] if application is None else [("application", application)]))
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = GenerationStub(self._channel)

    def generate(self, prompt: str | Sequence[int], **arguments: Unpack[CallArguments]) -> Completion:
        """The whole completion of `prompt`, a text or token ids; `CallArguments` lists the other arguments.

        `lookaheads` are the numbers of tokens to draft: first at the level below the target, then at each level below
        that; (0, 0) turns speculation off. They change the speed and never the output.

        To resume a stream that broke off, make the same call with the seed of its first chunk, and the tokens received
        so far as `resume_token_ids`. These count towards `max_tokens`, and are not sent again.
        """
        request, timeout_s = self._request(prompt, arguments)
        try:
            response = self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return completion_from_proto(response)

    def stream(self, prompt: str | Sequence[int], **arguments: Unpack[CallArguments]) -> ChunkStream:
        """The completion in chunks as it is decoded; arguments as for `generate`. Closing or dropping the stream
        cancels it.
        """
        request, timeout_s = self._request(prompt, arguments)
        return ChunkStream(self._stub.GenerateStream(request, timeout=timeout_s, metadata=self._metadata))

    def _request(
        self, prompt: str | Sequence[int], arguments: CallArguments
    ) -> tuple[pb.GenerateRequest, float | None]:
        """The call's message, and its time limit in seconds."""
        if arguments.get("timeout_s") is None:
            arguments["timeout_s"] = self.timeout_s
        return build_request(prompt, arguments), arguments["timeout_s"]

    def models(self) -> tuple[Model, ...]:
        """The models that the deployment serves, the default one first."""
        try:
            response = self._stub.ListModels(pb.ListModelsRequest(), timeout=self.timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return models_from_proto(response)

    def close(self) -> None:
        """End the connection and every call on it."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class StreamingCall(Protocol):
    """The part of gRPC's call that `ChunkStream` uses."""

    def __next__(self) -> pb.GenerateChunk: ...

    def cancel(self) -> object: ...


class ChunkStream(Iterator[Chunk]):
    """The chunks of one streamed completion. Closing the stream ends the call and the generation on the server."""

    def __init__(self, call: StreamingCall) -> None:
        self._call = call
        self._closed = False

    def __next__(self) -> Chunk:
        if self._closed:
            raise StopIteration
        try:
            message = next(self._call)
            while not message.ByteSize():  # Ray Serve's proxy sends an empty message before an error
                message = next(self._call)
        except grpc.RpcError as error:
            if self._closed:  # another thread closed the stream while this one waited
                raise StopIteration from None
            raise from_rpc_error(error) from error
        return chunk_from_proto(message)

    def close(self) -> None:
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
