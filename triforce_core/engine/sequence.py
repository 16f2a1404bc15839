"""Requests, their records inside the engine, and their outputs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from itertools import zip_longest

from triforce_core.kv.snapshot import CutRecord
from triforce_core.messages import SamplingParams, SequenceSpec, Span, Tally, TokenLogprobs, Work


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token, or a stop string found in the text
    LENGTH = "length"  # max_tokens
    CANCELLED = "cancelled"
    NO_TOKEN = "no_token"  # the sampling parameters exclude every token that could follow: an error of the request


@dataclass(frozen=True, slots=True)
class Request:
    """A user's request, in token ids only: the server or the command converts text."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    seed: int
    lookaheads: tuple[int, int]  # tokens drafted by the retrieval tier, and by the draft tier; 0 skips a tier
    stop_token_ids: tuple[int, ...] = ()
    resume: tuple[int, ...] = ()  # output tokens already emitted by an earlier attempt; they count as output
    grammar: str = ""  # see SequenceSpec, for the two below as well
    logprobs: int | None = None
    prompt_logprobs: int | None = None


SEED_BITS = 53  # of seeds that are drawn or derived: JSON readers that use doubles keep them exact


def nth_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request for several; the first has the request's own."""
    if index == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()) >> 64 - SEED_BITS


@dataclass(slots=True)
class Stats:
    """Times and counts of one request, measured by the engine."""

    queued_s: float = 0.0
    prefill_s: float = 0.0  # until the first token, which comes from the pass over the last prefill chunk
    decode_s: float = 0.0
    decoded: int = 0  # tokens after the first
    snapshots: int = 0
    tallies: list[Tally] = field(default_factory=lambda: [Tally(), Tally(), Tally()])  # target, retrieval, draft level

    def add(self, tallies: tuple[Tally, ...]) -> None:
        """Add the tallies of one answer of the target; entries beyond the three levels are ignored."""
        self.tallies = [mine + more for mine, more in zip_longest(self.tallies, tallies[:3], fillvalue=Tally())]

    def copy(self) -> Stats:
        """A copy of the present figures, which later rounds do not change."""
        return replace(self, tallies=list(self.tallies))

    @property
    def tokens_per_round(self) -> float | None:
        """Mean tokens committed per round of the target."""
        return self.decoded / self.tallies[0].rounds if self.tallies[0].rounds else None

    @property
    def ms_per_token(self) -> float | None:
        return 1e3 * self.decode_s / self.decoded if self.decoded else None

    @property
    def acceptance(self) -> dict[str, float | None]:
        """Share of each drafting tier's verified tokens that the tier above accepted; None where none were verified."""
        target, retrieval = self.tallies[0], self.tallies[1]
        if not retrieval.rounds:  # no retrieval tier: the target verified the draft tier's tokens
            return {"retrieval": None, "draft": target.acceptance}
        return {"retrieval": target.acceptance, "draft": retrieval.acceptance}


@dataclass(frozen=True, slots=True)
class Output:
    """Newly committed tokens of one request; the last one of a request carries `finish_reason`."""

    sequence_id: int
    tokens: tuple[int, ...]
    origins: bytes  # one Tier per token
    finish_reason: FinishReason | None
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if the request asks for them
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt tokens after those reported before


@dataclass(slots=True)
class Sequence:
    """The engine's record of one live request."""

    sequence_id: int
    request: Request
    spec: SequenceSpec
    tokens: list[int]
    prefilled: int = 0  # the target holds KV up to here
    stated: int = 0  # the tiers below the target are believed to know the tokens up to here
    work: Work | None = None  # submitted and not answered
    last_cut: CutRecord | None = None  # the latest snapshot
    stats: Stats = field(default_factory=Stats)
    clock: float = field(default_factory=time.perf_counter)

    @property
    def prefilling(self) -> bool:
        """Whether the target still lacks tokens of the prompt or of the resumed output."""
        return self.prefilled < len(self.request.prompt) + len(self.request.resume)

    def span(self, start: int, stop: int) -> Span:
        return Span(self.sequence_id, start, tuple(self.tokens[start:stop]), self.spec if start == 0 else None)

    def lap(self) -> float:
        """Seconds since the last call."""
        now = time.perf_counter()
        elapsed, self.clock = now - self.clock, now
        return elapsed
