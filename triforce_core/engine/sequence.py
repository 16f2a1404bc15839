"""Requests, their records inside the engine, and their outputs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from itertools import zip_longest

from triforce_core.engine.acceptances import Drafted
from triforce_core.engine.freshness import SinceCut
from triforce_core.kv.prefix_tree import Cursor
from triforce_core.kv.snapshot import CutRecord
from triforce_core.messages import Drafting, SamplingParams, SequenceSpec, Span, Tally, TokenLogprobs, Work
from triforce_core.plans import PLAIN, Plan
from triforce_core.speculation.lookup import Shadow


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token, or a stop string found in the text
    LENGTH = "length"  # max_tokens
    CANCELLED = "cancelled"
    DEADLINE = "deadline"  # the request's time is over: an error of the request
    FAILED = "failed"  # the engine raised an error when it worked on this request
    NO_TOKEN = "no_token"  # the sampling parameters exclude every token that could follow: an error of the request


@dataclass(frozen=True, slots=True)
class Request:
    """A user's request, in token ids only: the server or the command converts text."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    seed: int
    # Tokens drafted by the retrieval tier, and by the draft tier; 0 skips a tier. None: the controller decides.
    lookaheads: tuple[int, int] | None
    stop_token_ids: tuple[int, ...] = ()
    resume: tuple[int, ...] = ()  # output tokens already emitted by an earlier attempt; they count as output
    grammar: str = ""  # see SequenceSpec, for the two below as well
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0  # requests with a lower number are served first
    timeout_s: float | None = None  # seconds after its submission in which the request must end
    drafting: Drafting = Drafting.MODEL  # where `lookaheads` are given
    selector: str | None = None  # a key of kv.selectors.SELECTORS; None: the settings'
    cache_salt: str = ""  # see SequenceSpec


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
    preempted: int = 0  # how many times its KV was dropped because the pool was full
    cached_tokens: int = 0  # of the prompt, those whose KV was found when the request was first admitted
    # Seconds from going live to the first token, which the last prefill chunk's pass draws; after a preemption the
    # seconds of the second prefill are added.
    prefill_s: float = 0.0
    decode_s: float = 0.0
    # Tokens that came from rounds: all but the first. A preempted request is prefilled again, and the token that comes
    # from its last chunk is not counted either.
    decoded: int = 0
    snapshots: int = 0
    plan: str = ""  # of the latest round
    plans: dict[str, int] = field(default_factory=dict)  # rounds of the target by kind of plan
    plan_changes: int = 0  # how often the controller changed the kind of plan
    # Where the controller plans: milliseconds per token as expected with its latest choice, and of plain decoding.
    expected_ms: float | None = None
    plain_ms: float | None = None
    tallies: list[Tally] = field(default_factory=lambda: [Tally(), Tally(), Tally()])  # target, retrieval, draft level
    direct: Tally = field(default_factory=Tally)  # the target's part of `tallies` in rounds without the retrieval tier

    def add(self, plan: Plan, tallies: tuple[Tally, ...]) -> None:
        """Add a round of the target with its tallies; entries beyond the three levels are ignored."""
        self.tallies = [mine + more for mine, more in zip_longest(self.tallies, tallies[:3], fillvalue=Tally())]
        if not plan.retrieval:
            self.direct += tallies[0]
        self.plan = str(plan)
        self.plans[plan.kind] = self.plans.get(plan.kind, 0) + 1

    def copy(self) -> Stats:
        """A copy of the present figures, which later rounds do not change."""
        return replace(self, tallies=list(self.tallies), plans=dict(self.plans))

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
        target, retrieval, _ = self.tallies
        return {"retrieval": (target - self.direct).acceptance, "draft": (retrieval + self.direct).acceptance}


@dataclass(slots=True)
class Totals:
    """What all requests have done together, for metrics: counts that never decrease."""

    # The rounds, snapshots and preemptions of all requests. The fields for times and for the latest plan have no
    # meaning here.
    stats: Stats = field(default_factory=Stats)
    rounds_by_tokens: dict[int, int] = field(default_factory=dict)  # rounds by the tokens that they committed
    # Tokens of prompts: those whose KV was found, and those that were prefilled. Requests that are resumed after a
    # failure are not counted.
    prefix_hit_tokens: int = 0
    prefix_miss_tokens: int = 0

    def add(self, plan: Plan, tallies: tuple[Tally, ...], tokens: int) -> None:
        """Add a round of the target that committed so many tokens."""
        self.stats.add(plan, tallies)
        self.rounds_by_tokens[tokens] = self.rounds_by_tokens.get(tokens, 0) + 1

    def read(self, hit_tokens: int, miss_tokens: int) -> None:
        """Add a request's prompt, once it has been read."""
        self.prefix_hit_tokens += hit_tokens
        self.prefix_miss_tokens += miss_tokens

    def copy(self) -> Totals:
        return replace(self, stats=self.stats.copy(), rounds_by_tokens=dict(self.rounds_by_tokens))


@dataclass(frozen=True, slots=True)
class Output:
    """Newly committed tokens of one request; the last one of a request carries `finish_reason`."""

    sequence_id: int  # the request's id, as `Engine.submit` returned it; a preemption does not change it
    tokens: tuple[int, ...]
    origins: bytes  # one Origin per token
    finish_reason: FinishReason | None
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if the request asks for them
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt tokens after those reported before


@dataclass(slots=True, eq=False)
class Sequence:
    """The engine's record of one request. A request that is preempted goes on in a new record."""

    sequence_id: int  # among the tiers
    request: Request
    spec: SequenceSpec
    tokens: list[int]
    request_id: int = 0  # for the caller: the sequence id of the request's first record
    given: int = 0  # tokens to prefill: the prompt, and output that is already there
    deadline: float = math.inf  # in the seconds of `clock`
    due: int = 0  # see Scheduler._share_chunks
    stalled_s: float = 0.0  # seconds of prompt chunks of others since its last tokens
    round_s: float = 0.0  # seconds of its last round, without such chunks
    beginning: Cursor | None = None  # where its text is looked for in the pool; None: it shares nothing
    agreed: dict[int, int] = field(default_factory=dict)  # tokens that the texts of live sequences share with its own
    passed_by: int = 0  # tokens for which later requests reserved slots while this one waited
    prefilled: int = 0  # the target holds KV up to here
    stated: int = 0  # the tiers below the target are believed to know the tokens up to here
    work: Work | None = None  # submitted and not answered
    plan: Plan = PLAIN  # of its next rounds
    shadow: Shadow | None = None  # scores prompt lookup; made at the first round without the draft tier
    plan_waits: bool = False  # plain rounds are run until its snapshot has arrived
    drafted: Drafted = field(default_factory=Drafted)
    apart_s: float = 0.0  # seconds since its last tokens in which the engine cut first snapshots, of whichever request
    last_cut: CutRecord | None = None  # the latest snapshot
    since_cut: SinceCut = field(default_factory=SinceCut)
    stats: Stats = field(default_factory=Stats)
    clock: float = field(default_factory=time.perf_counter)
    scored: int = 0  # prompt tokens whose logprobs the target has reported
    reported: int = 0  # prompt tokens whose logprobs the caller has
    entered: bool = False  # whether a pass over its tokens has begun
    preempted: bool = False  # whether it was preempted before: that happens once at most

    def __post_init__(self) -> None:
        self.request_id = self.request_id or self.sequence_id
        self.given = len(self.tokens)
        if self.request.lookaheads is not None:
            self.plan = Plan(*self.request.lookaheads, self.request.drafting)

    def again(self, sequence_id: int) -> Sequence:
        """The record in which this request goes on after it was preempted: its tokens so far are prefilled again, under
        another id, so that nothing that the tiers hold or send for the old one is taken for the new one.
        """
        self.stats.preempted += 1
        self.drafted.kind = ""  # the tiers begin anew
        return Sequence(
            sequence_id,
            self.request,
            self.spec,
            self.tokens,
            self.request_id,
            deadline=self.deadline,
            stats=self.stats,
            clock=self.clock,
            drafted=self.drafted,
            reported=self.reported,
            entered=self.entered,
            preempted=True,
        )

    @property
    def prefilling(self) -> bool:
        """Whether the target still lacks tokens of the prompt or of the output that was already there."""
        return self.prefilled < self.given

    @property
    def has_output(self) -> bool:
        """Whether the target has drawn a token of this request."""
        return len(self.tokens) > len(self.request.prompt) + len(self.request.resume)

    def unreported(self, scores: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...]:
        """Of the logprobs of the next prompt tokens, those that the caller did not get before a preemption."""
        first = self.reported - self.scored
        self.scored += len(scores)
        self.reported = max(self.reported, self.scored)
        return scores[max(0, first) :]

    def span(self, start: int, stop: int) -> Span:
        return Span(self.sequence_id, start, tuple(self.tokens[start:stop]), self.spec if start == 0 else None)

    def lap(self) -> float:
        """Seconds since the last call."""
        now = time.perf_counter()
        elapsed, self.clock = now - self.clock, now
        return elapsed
