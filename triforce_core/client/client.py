"""The synchronous client: one channel to a deployment, and blocking calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, Unpack

import grpc

from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.client.calls import CHANNEL_OPTIONS, GENERATION, Call, Client, Result
from triforce_core.client.errors import broken_off, from_rpc_error, typed_if
from triforce_core.client.progress import Progress
from triforce_core.client.request import CallArguments, Message, chat_messages
from triforce_core.client.results import Chunk, Completion, Model


class TriForceClient(Client):
    """A client whose calls block. It can be shared between threads."""

    def __init__(self, address: str = "127.0.0.1:9000", **settings: Any) -> None:
        super().__init__(address, **settings)
        self._closed = threading.Event()
        self._channel = (
            grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
            if self._credentials is None
            else grpc.secure_channel(address, self._credentials, options=CHANNEL_OPTIONS)
        )

    def generate(self, prompt: str | Sequence[int], **arguments: Unpack[CallArguments]) -> Completion:
        """The whole completion of `prompt`, a text or token ids; `CallArguments` lists the other arguments.

        `lookaheads` are the numbers of tokens to draft: first at the level below the target, then at each level below
        that; (0, 0) turns speculation off. They change the speed and never the output.

        To resume by hand a stream that broke off, make the same call with the seed of its first chunk, and the tokens
        received so far as `resume_token_ids`. These count towards `max_tokens`, and are not sent again.
        """
        return self._call(self._generate_call(prompt, arguments))

    def stream(self, prompt: str | Sequence[int], **arguments: Unpack[CallArguments]) -> ChunkStream:
        """The completion in chunks as it is decoded; arguments as for `generate`. Closing or dropping the stream
        cancels it.

        If the server goes away, the stream continues by itself in another call, with exactly the tokens and the text
        that are missing, within the client's `retries`. `stats` then cover the last call alone.
        """
        return self._stream(self._progress(prompt, arguments))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Unpack[CallArguments],
    ) -> Completion:
        """The assistant's next message in the conversation `messages`: mappings with `role` and `content`, and where
        tools are called `tool_calls`, `tool_call_id` and `name`, as in OpenAI's API. The server renders them with the
        model's own template. `tools` are the functions that the model may call; other arguments as for `generate`.
        """
        return self._call(self._generate_call(chat_messages(messages, tools), arguments))

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Unpack[CallArguments],
    ) -> ChunkStream:
        """The message of `chat` in chunks, as by `stream`."""
        return self._stream(self._progress(chat_messages(messages, tools), arguments))

    def tokenize(
        self, prompt: str | Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, model: str = ""
    ) -> tuple[int, ...]:
        """The tokens of a text or a conversation, special ones included, as `generate` and `chat` would send them."""
        return self._call(self._tokenize_call(prompt, tools, model))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """The text of these tokens, with the names of special ones."""
        return self._call(self._detokenize_call(token_ids, model))

    def models(self) -> tuple[Model, ...]:
        """The models that the deployment serves, the default one first."""
        return self._call(self._models_call())

    def health(self, timeout_s: float = 10.0) -> bool:
        """Whether a request would be served, by the deployment's `grpc.health.v1` service."""
        return self._call(self._health_call(timeout_s), retries=0)

    def close(self) -> None:
        """End the connection and every call on it, which raise `CallCancelledError`, as all later ones do."""
        self._closed.set()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self, call: Call[Result], retries: int | None = None) -> Result:
        method = self._channel.unary_unary(
            call.path, type(call.request).SerializeToString, response_deserializer=call.answer.FromString
        )
        attempts = self._attempts(call.timeout_s, retries)
        while True:
            try:
                with typed_if(self._closed.is_set):
                    answer = method(call.request, timeout=attempts.left_s, metadata=self._metadata)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                delay_s = attempts.delay_s(failure)
                if delay_s is None:
                    raise failure from error
                self._closed.wait(delay_s)  # the next attempt raises where the client is closed
            else:
                return call.result(answer)

    def _stream(self, progress: Progress) -> ChunkStream:
        method = self._channel.unary_stream(
            f"{GENERATION}/GenerateStream",
            pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateChunk.FromString,
        )
        metadata, closed = self._metadata, self._closed.is_set  # so that the stream does not hold the client

        def start() -> Any:
            with typed_if(closed):
                return method(progress.request, timeout=progress.attempts.left_s, metadata=metadata)

        return ChunkStream(progress, start)


class ChunkStream(Iterator[Chunk]):
    """The chunks of one streamed completion. Closing the stream ends the call and the generation on the server."""

    def __init__(self, progress: Progress, start: Callable[[], Any]) -> None:
        """`start` makes gRPC's call, an iterator of `pb.GenerateChunk` that can be cancelled."""
        self._progress, self._start = progress, start
        self._closed = threading.Event()
        self._call = start()

    def __next__(self) -> Chunk:
        while not self._closed.is_set():
            try:
                chunk = self._progress.take(next(self._call))
            except (grpc.RpcError, StopIteration) as error:
                if self._closed.is_set() or self._progress.ended:  # another thread closed it while this one waited
                    break
                self._resume(error)
            else:
                if chunk is not None:
                    return chunk
        raise StopIteration

    def _resume(self, error: grpc.RpcError | StopIteration) -> None:
        """Go on in another call after a delay. Raises the error as a `CallError` where that is not possible."""
        failure = broken_off() if isinstance(error, StopIteration) else from_rpc_error(error)
        delay_s = self._progress.delay_s(failure)
        if delay_s is None:
            raise failure from error
        if not self._closed.wait(delay_s):
            self._progress.prepare()
            self._call = self._start()
            if self._closed.is_set():  # meanwhile
                self._call.cancel()

    def close(self) -> None:
        self._closed.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
