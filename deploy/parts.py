"""A completion on its way to the client: the pipelines that decode it, and the parts that the service makes of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.detokenizer import TextDelta
from triforce_core.engine.sequence import FinishReason, Stats
from triforce_core.messages import TokenLogprobs


class Pipelines(Protocol):
    """The pipelines that decode requests."""

    def decode(self, request: pb.DecodeRequest) -> AsyncGenerator[pb.DecodeEvent, None]:
        """A request's tokens as they are committed; closing the generator stops the request.

        Raises `UnavailableError` where the engine or the way to it is gone, `FingerprintError` where the output cannot
        go on there, and the errors of requests.
        """
        ...

    async def status(self) -> dict[str, list[pb.TierStatus]]:
        """By the replica's name, the status of each of its tiers, draft first. Raises `UnavailableError`."""
        ...

    async def check(self) -> None:
        """Raise `UnavailableError` unless a pipeline can serve."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    """The summary of a finished completion."""

    finish_reason: FinishReason
    completion_tokens: int
    stats: Stats
    stop: str | None = None  # the stop string that ended it
    # When the target that ended it had the request, in seconds of `time.monotonic`; None: no target was asked.
    reached_at: float | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a completion; the last one has `done`."""

    piece: TextDelta
    seed: int
    prompt_tokens: int
    done: Done | None = None
    # Number of the completion among the `n` of its request. Where there are several requests, the numbers of the next
    # go on from those of the one before.
    index: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of prompt tokens; in a completion's first parts
    prompt: tuple[int, ...] = ()
    lossy: str | None = None  # what the target has forgotten, in words; None: the output is the model's own
    echoed: int = 0  # leading characters of the text that are the prompt's
    cached_tokens: int = 0  # of the prompt, those whose KV was found
    so_far: pb.DecodeStats | None = None  # how the output was made until now, if asked for; not in the last part
    fingerprint: str = ""  # of the target that made it
