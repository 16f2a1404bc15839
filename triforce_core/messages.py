"""What the tiers say to one another. Absolute statements only: repeating a message is harmless.

A `Span` says what a sequence *is* from some position on; `Work` asks a tier to continue it; a `Proposal` is the answer.
docs/architecture.md shows how they are used; docs/decisions/0001-protocol-additions.md why two of the fields exist.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple, Protocol

from triforce_core.errors import require


class Tier(IntEnum):
    """Where a token came from. The values are those of the wire and of `Proposal.origins`."""

    DRAFT = 0
    RETRIEVAL = 1
    TARGET = 2


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token's distribution is warped before a token is drawn; the defaults leave the model's own."""

    temperature: float = 1.0  # 0 is greedy, and so is anything below 1e-4
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.temperature <= 100, "temperature", self.temperature, "must be between 0 and 100")
        if self.temperature < 1e-4:  # logits divided by less would overflow
            object.__setattr__(self, "temperature", 0.0)
        require(0 <= self.top_k < 2**31, "top_k", self.top_k, "must be 0 (off) or more, and below 2**31")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must be above 0 and at most 1")
        require(0 <= self.min_p <= 1, "min_p", self.min_p, "must be between 0 and 1")


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What a tier must know of a request to draw its tokens: fixed for the life of the sequence."""

    sampling: SamplingParams
    seed: int  # -2**63 ≤ seed < 2**63
    prompt_length: int  # tokens
    max_length: int  # prompt and output together, tokens; no tier goes beyond
    stop_token_ids: tuple[int, ...] = ()  # a tier that draws one of these ends its block with it


@dataclass(frozen=True, slots=True)
class Span:
    """The sequence from position `start` on is now `tokens`, and ends there."""

    sequence_id: int  # never reused
    start: int
    tokens: tuple[int, ...]
    spec: SequenceSpec | None = None  # always present where start is 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def extended(self, tokens: tuple[int, ...]) -> Span:
        """The same statement with `tokens` after its end."""
        return Span(self.sequence_id, self.start, self.tokens + tokens, self.spec)


def in_turn(earlier: Span, later: Span) -> Span:
    """Both statements as one: of work that is replaced before it was looked at, what it stated still holds."""
    if not earlier.start < later.start <= earlier.end:
        return later
    kept = earlier.tokens[: later.start - earlier.start]
    return Span(earlier.sequence_id, earlier.start, kept + later.tokens, earlier.spec)


@dataclass(frozen=True, slots=True)
class Work:
    """Continue `span`.

    `lookaheads[0]` is how many tokens this level drafts before it hands up its block, `lookaheads[1:]` the same for
    each level below; 0 skips a level. Rounds are never cut: a block may be longer by what the last round accepted.
    """

    span: Span
    lookaheads: tuple[int, ...]
    sample: bool = True  # False: a prefill chunk, no logits wanted


class Tally(NamedTuple):
    """What one verifying level did with what was proposed to it."""

    rounds: int = 0
    proposed: int = 0  # tokens
    accepted: int = 0  # of these
    rejected: int = 0  # rounds that ended at a token it did not accept; what came after that was never judged

    @property
    def acceptance(self) -> float | None:
        """The chance that a proposed token is accepted when those before it were: alpha of E(alpha, gamma)."""
        judged = self.accepted + self.rejected
        return self.accepted / judged if judged else None

    def __add__(self, other: tuple[int, ...]) -> Tally:  # type: ignore[override]
        return Tally(*(a + b for a, b in zip(self, other, strict=True)))


def wait_in_turn(waiting: dict[int, Work], work: list[Work]) -> None:
    """Put work, by sequence id, beside what waits; of work that it replaces the statement is kept."""
    for w in work:
        replaced = waiting.get(w.span.sequence_id)
        span = in_turn(replaced.span, w.span) if replaced else w.span
        waiting[w.span.sequence_id] = replace(w, span=span)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A continuation from absolute position `start`; may be empty: verifying that is one plain decoding step."""

    sequence_id: int
    start: int  # absolute position of tokens[0]
    tokens: tuple[int, ...] = ()
    origins: bytes = b""  # one Tier a token
    missing_from: int | None = None  # "I lack tokens of this sequence: state it from here"
    snapshot_wanted: bool = False  # "I lack the sparse KV of this sequence: hand me a snapshot"
    tallies: tuple[Tally, ...] = ()  # of the answering level and of each below it, for this proposal


class Proposer(Protocol):
    """A tier as the level above sees it. Every submitted Work gets one answer, unless later Work replaces it."""

    def submit(self, work: list[Work]) -> None: ...

    def collect(self, timeout_s: float) -> list[Proposal]:
        """Any subset that is ready, in any order; blocks up to `timeout_s` seconds when none is."""
        ...

    def release(self, sequence_ids: list[int]) -> None:
        """Forget these sequences; unknown ones are ignored."""
        ...


@dataclass(frozen=True, slots=True)
class Claim:
    """A proposal to be verified: `span` is the text before it, `proposed` came from the level below."""

    span: Span
    proposed: tuple[int, ...]
    sample: bool = True  # False: forward the span and judge nothing (a prefill chunk)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`tokens` are the verifier's own from the end of the claim's span on: `num_accepted` agreed, at most one more."""

    tokens: tuple[int, ...] = ()
    num_accepted: int = 0
    ended: bool = False  # the last token is a stop token, or max_length is reached
    missing_from: int | None = None
    snapshot_wanted: bool = False
