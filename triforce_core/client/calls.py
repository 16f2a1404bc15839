"""What synchronous and asynchronous clients share: connections, and calls as data."""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message as ProtobufMessage
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core.client.progress import Attempts, Progress
from triforce_core.client.request import MAX_MESSAGE_BYTES, CallArguments, Message, Prompt, build_request, chat_messages
from triforce_core.client.results import Completion, Model, completion_from_proto, models_from_proto

Result = TypeVar("Result")

CHANNEL_OPTIONS = (
    # Reconnects within seconds after a deployment is back; gRPC's default backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
GENERATION = "/triforce.v1.Generation"
KEY_VARIABLE = "TRIFORCE_API_KEY"
SEED_BITS = 53  # JSON readers that use doubles keep them exact
SERVING = 1  # of grpc.health.v1.HealthCheckResponse.ServingStatus


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """A call with one answer."""

    path: str
    request: ProtobufMessage
    answer: type[ProtobufMessage]
    result: Callable[[Any], Result]  # of the answer
    timeout_s: float | None


class Client:
    """The base of both clients, which send the calls that this class makes.

    `timeout_s` bounds every call, and a stream as a whole, unless the call has its own `timeout_s`; None means no
    limit. A call that fails because the server is away or full is tried up to `retries` times more, after delays that
    double from a quarter of a second up to 5 s, about 25 s in all by default; for a stream, failures are counted from 0
    again after 16 new tokens. `health` is tried once. A repeated call gives the same tokens, because the client draws
    the seed where none is given.

    `tls` encrypts the connection: `True` trusts the authorities that gRPC trusts by default, `root_certificates` (PEM,
    or the path of a file with it) trusts these instead, and credentials from `grpc.ssl_channel_credentials` may hold a
    certificate of the client. `api_key` is sent with every call; by default it is the environment variable
    TRIFORCE_API_KEY, unless `metadata` has `authorization`. Without TLS, it can be read by whoever can read the
    traffic.

    `application` is the name of the Ray Serve application, needed where the proxy serves several; `metadata` is sent
    with every call. Calls raise `CallError`s (`triforce_core.client.errors`).
    """

    def __init__(
        self,
        address: str = "127.0.0.1:9000",
        *,
        timeout_s: float | None = 600.0,
        retries: int = 10,
        tls: bool | grpc.ChannelCredentials = False,
        root_certificates: bytes | str | Path | None = None,
        api_key: str | None = None,
        application: str | None = None,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        if retries < 0:
            raise ValueError(f"retries: {retries} must be at least 0")
        self.address, self.timeout_s, self.retries = address, timeout_s, retries
        self._credentials = _credentials(tls, root_certificates)
        self._metadata = tuple(metadata)
        if application is not None:
            self._metadata += (("application", application),)
        if "authorization" not in dict(self._metadata):
            self._metadata += authorization(api_key)
        elif api_key:
            raise ValueError("api_key: contradicts authorization in metadata")

    def _attempts(self, timeout_s: float | None, retries: int | None = None) -> Attempts:
        return Attempts(timeout_s, self.retries if retries is None else retries)

    def _generate_call(self, prompt: Prompt, arguments: CallArguments) -> Call[Completion]:
        request, timeout_s = self._request(prompt, arguments)
        return Call(f"{GENERATION}/Generate", request, pb.GenerateResponse, completion_from_proto, timeout_s)

    def _request(self, prompt: Prompt, arguments: CallArguments) -> tuple[pb.GenerateRequest, float | None]:
        """The call's message, and its time limit in seconds."""
        if arguments.get("timeout_s") is None:
            arguments["timeout_s"] = self.timeout_s
        request = build_request(prompt, arguments)
        if not request.HasField("seed"):  # drawn here, so that the call can be repeated
            request.seed = secrets.randbits(SEED_BITS)
        return request, arguments["timeout_s"]

    def _progress(self, prompt: Prompt, arguments: CallArguments) -> Progress:
        request, timeout_s = self._request(prompt, arguments)
        return Progress(request, self._attempts(timeout_s))

    def _tokenize_call(
        self, prompt: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, model: str
    ) -> Call[tuple[int, ...]]:
        request = pb.TokenizeRequest(model=model)
        if isinstance(prompt, str):
            request.text = build_request(prompt, {}).text
        else:
            request.messages.CopyFrom(chat_messages(prompt, tools))
        return Call(
            f"{GENERATION}/Tokenize",
            request,
            pb.TokenizeResponse,
            lambda answer: tuple(answer.token_ids),
            self.timeout_s,
        )

    def _detokenize_call(self, token_ids: Sequence[int], model: str) -> Call[str]:
        values = build_request(token_ids, {}).token_ids.values
        request = pb.DetokenizeRequest(model=model, token_ids=values)
        return Call(
            f"{GENERATION}/Detokenize", request, pb.DetokenizeResponse, lambda answer: str(answer.text), self.timeout_s
        )

    def _models_call(self) -> Call[tuple[Model, ...]]:
        request = pb.ListModelsRequest()
        return Call(f"{GENERATION}/ListModels", request, pb.ListModelsResponse, models_from_proto, self.timeout_s)

    @staticmethod
    def _health_call(timeout_s: float) -> Call[bool]:
        # These well-known types have the wire form of HealthCheckRequest and HealthCheckResponse, whose own module
        # would be a third package to install.
        return Call("/grpc.health.v1.Health/Check", StringValue(), Int32Value, is_serving, timeout_s)


def authorization(api_key: str | None = None) -> tuple[tuple[str, str], ...]:
    """The header or metadata with the key, by default the environment's. Raises `ValueError` if it cannot be sent."""
    key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
    if not (key.isascii() and key.isprintable()):
        raise ValueError("api_key: must be printable ASCII characters")  # the key itself is not shown
    return (("authorization", f"Bearer {key}"),) if key else ()


def is_serving(answer: Int32Value) -> bool:
    return answer.value == SERVING


def _credentials(
    tls: bool | grpc.ChannelCredentials, root_certificates: bytes | str | Path | None
) -> grpc.ChannelCredentials | None:
    """The channel's credentials; None: no TLS."""
    if isinstance(tls, grpc.ChannelCredentials):
        if root_certificates is not None:
            raise ValueError("root_certificates: must be part of the credentials given as tls")
        return tls
    if isinstance(root_certificates, str | Path):
        root_certificates = Path(root_certificates).read_bytes()
    if tls or root_certificates is not None:
        return grpc.ssl_channel_credentials(root_certificates)
    return None
