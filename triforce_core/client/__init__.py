"""The client SDK for a deployment's generation service over gRPC. It needs only grpcio and protobuf.

from triforce_core.client import TriForceClient

with TriForceClient("127.0.0.1:9000") as client:
    for chunk in client.stream("Once upon a time", max_tokens=64, seed=1):
        print(chunk.text, end="", flush=True)
"""

from triforce_core.client.aio import AsyncChunkStream, AsyncTriForceClient
from triforce_core.client.client import ChunkStream, TriForceClient
from triforce_core.client.errors import (
    AuthenticationError,
    CallCancelledError,
    CallError,
    DeadlineExceededError,
    EngineCrashError,
    FingerprintError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ServerError,
    UnavailableError,
)
from triforce_core.client.request import CallArguments
from triforce_core.client.results import (
    Acceptance,
    Choice,
    Chunk,
    Completion,
    FinishReason,
    Model,
    Stats,
    TokenLogprobs,
    Usage,
)

__all__ = [
    "Acceptance",
    "AsyncChunkStream",
    "AsyncTriForceClient",
    "AuthenticationError",
    "CallArguments",
    "CallCancelledError",
    "CallError",
    "Choice",
    "Chunk",
    "ChunkStream",
    "Completion",
    "DeadlineExceededError",
    "EngineCrashError",
    "FingerprintError",
    "FinishReason",
    "InvalidRequestError",
    "Model",
    "NotFoundError",
    "OverloadedError",
    "ServerError",
    "Stats",
    "TokenLogprobs",
    "TriForceClient",
    "UnavailableError",
    "Usage",
]
