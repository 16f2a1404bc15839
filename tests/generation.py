"""A generation service without a model, in this process: its output is a function of prompt and seed, and it fails on
demand.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core._gen.triforce.v1.generation_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server

FINGERPRINT = "fp_1"


@dataclass
class Failure:
    """Abort a call with this status once it has sent so many tokens."""

    code: grpc.StatusCode
    after: int = 0
    done: Callable[[], object] = lambda: None  # called first
    details: str = "the replica is gone"


def token_at(prompt: str, seed: int, index: int) -> int:
    return (len(prompt) * 131 + seed * 31 + index * 7) % 1000


def text_at(token: int, index: int) -> str:
    """The text of a token. Every third token has no text of its own: its text comes with the next token."""
    return "" if index % 3 == 1 else f"<{token}>"


def origin_at(index: int) -> int:
    return index % 4


class Generation(GenerationServicer):
    """Each chunk has one token, and the last chunk has the finish. Several completions come one after another, with
    seeds that count up. `failures` says how the next calls fail, in order.
    """

    def __init__(self, *failures: Failure, keys: tuple[str, ...] = ()) -> None:
        self.failures = deque(failures)
        self.keys = keys
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: dict[str, str | bytes] = {}
        self.authorizations: list[str | bytes] = []
        self.ended = threading.Event()

    def enter(self, context: grpc.ServicerContext) -> None:
        sent = context.invocation_metadata()
        self.metadata = dict(sent)
        self.authorizations = [value for name, value in sent if name == "authorization"]
        allowed = {f"Bearer {key}" for key in self.keys}
        if allowed and self.metadata.get("authorization") not in allowed:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the API key is missing or not valid")

    def chunks(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateChunk]:
        self.enter(context)
        self.requests.append(request)
        self.ended = ended = threading.Event()
        if not context.add_callback(ended.set):
            ended.set()
        failure = self.failures.popleft() if self.failures else None
        prompt = request.text or "".join(f"{each.role}: {each.content}\n" for each in request.messages.messages)
        seed = request.seed
        assert request.fingerprint in ("", FINGERPRINT)
        first = len(request.resume_token_ids)
        told = [token_at(prompt, seed, index) for index in range(first)]
        assert told == list(request.resume_token_ids), "resumed with other tokens than were sent"
        order = [(nth, index) for nth in range(max(request.n, 1)) for index in range(first, request.max_tokens)]
        for sent, (nth, index) in enumerate(order):
            if failure and sent == failure.after:
                failure.done()
                if failure.code is grpc.StatusCode.OK:  # it just ends
                    return
                context.abort(failure.code, failure.details)
            token = token_at(prompt, seed + nth, index)
            text = text_at(token, index)
            chunk = pb.GenerateChunk(
                text=text, token_ids=[token], origins=bytes([origin_at(index)]), text_lengths=[len(text)], index=nth
            )
            if index == first:
                chunk.seed, chunk.fingerprint = seed + nth, FINGERPRINT
                if not first and request.echo:
                    chunk.text = prompt + chunk.text
                if not nth and request.HasField("prompt_logprobs"):
                    chunk.prompt_logprobs.extend(pb.TokenLogprobs(logprob=-each) for each in range(len(prompt)))
            if index == request.max_tokens - 1:
                chunk.finish_reason = pb.FINISH_REASON_LENGTH
                chunk.usage.prompt_tokens, chunk.usage.completion_tokens = 3, request.max_tokens
                chunk.stats.prefill_s = 0.5
            yield chunk
        if failure and failure.after >= len(order):
            context.abort(failure.code, "gone after the last chunk")

    def GenerateStream(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateChunk]:
        yield from self.chunks(request, context)
        if request.text == "hang":
            self.ended.wait(10)

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.GenerateResponse:
        chunks = list(self.chunks(request, context))
        if request.text == "hang":
            self.ended.wait(10)
        text = "".join(chunk.text for chunk in chunks)
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        return pb.GenerateResponse(model="demo", choices=[pb.Choice(text=text, token_ids=tokens)])

    def ListModels(self, request: pb.ListModelsRequest, context: grpc.ServicerContext) -> pb.ListModelsResponse:
        self.enter(context)
        return pb.ListModelsResponse(models=[pb.Model(id="demo", context_length=32768)])

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        self.enter(context)
        text = request.text or "".join(each.content for each in request.messages.messages)
        return pb.TokenizeResponse(token_ids=map(ord, text), context_length=32768)

    def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.ServicerContext) -> pb.DetokenizeResponse:
        self.enter(context)
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))


def interrupt() -> None:
    """Send this process what Ctrl-C sends."""
    os.kill(os.getpid(), signal.SIGINT)


class Served:
    """A `Generation` behind a real gRPC server, which can die and come back at its address."""

    def __init__(self, generation: Generation, credentials: grpc.ServerCredentials | None = None) -> None:
        self.generation, self.credentials = generation, credentials
        self.health = health.HealthServicer()
        self.port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    def start(self) -> None:
        self.server = grpc.server(ThreadPoolExecutor(max_workers=8))
        add_GenerationServicer_to_server(self.generation, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.say(health_pb2.HealthCheckResponse.SERVING)
        # Not `localhost`, which is two addresses: if another process has the port at one of them, gRPC takes only the
        # other one, and clients may reach that process.
        address = f"127.0.0.1:{self.port}"
        if self.credentials is None:
            self.port = self.server.add_insecure_port(address)
        else:
            self.port = self.server.add_secure_port(address, self.credentials)
        self.server.start()

    def say(self, status: int) -> None:
        self.health.set("", status)

    def die(self) -> None:
        """End every call and the connection, at once."""
        self.server.stop(grace=None).wait()

    def die_and_come_back(self) -> None:
        """Restart on a separate thread, because the restart ends the call that asks for it."""

        def restart() -> None:
            self.die()
            self.start()

        threading.Thread(target=restart).start()
        self.generation.ended.wait(5)
