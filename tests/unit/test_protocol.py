"""The protocol on toy models: whatever delays, losses and restarts do, the output is that of plain seeded decoding.

The real Engine, Scheduler, SnapshotPolicy and SpeculativeDecoder drive tiers whose models are tables, over links that
misbehave. A descendant of the design's protocol_toy.py.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.lossy_link import LossyLink
from triforce_core.decoder import SpeculativeDecoder
from triforce_core.engine.engine import Engine, SnapshotPolicy
from triforce_core.engine.limits import Limits
from triforce_core.engine.scheduler import Scheduler
from triforce_core.engine.sequence import FinishReason, Request
from triforce_core.kv.ranges import RangeAllocator
from triforce_core.kv.selectors import MeanKey
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.messages import (
    Claim,
    Proposal,
    Proposer,
    SamplingParams,
    SequenceSpec,
    Span,
    Tally,
    Tier,
    Verdict,
    Work,
    in_turn,
)
from triforce_core.roles import ends, judge
from triforce_core.run_ahead import RunAhead

VOCAB = 5
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Law:
    """A model: weights of the next token, given the whole text before it. A share of the target's makes a drafter."""

    seed: int
    target: Law | None = None
    share: float = 0.0

    @functools.lru_cache(maxsize=200_000)  # noqa: B019
    def weights(self, text: Tokens) -> Tokens | tuple[float, ...]:
        rng = random.Random(f"{self.seed}/{text}")
        own = [rng.random() ** 3 + 0.01 for _ in range(VOCAB)]
        if self.target is None:
            return tuple(w / sum(own) for w in own)
        theirs = self.target.weights(text)
        return tuple((1 - self.share) * w / sum(own) + self.share * t for w, t in zip(own, theirs, strict=True))

    def draw(self, text: Tokens, spec: SequenceSpec) -> int:
        """argmax(log p / T + g), with Gumbel noise g of (seed, position, token), the same in every tier."""
        weights, temperature = self.weights(text), spec.sampling.temperature
        if not temperature:
            return max(range(VOCAB), key=weights.__getitem__)

        def perturbed(token: int) -> float:
            uniform = random.Random(f"{spec.seed}/{len(text)}/{token}").random()
            return math.log(weights[token]) / temperature - math.log(-math.log(uniform))

        return max(range(VOCAB), key=perturbed)

    def plain(self, text: Tokens, spec: SequenceSpec) -> Tokens:
        """Plain decoding, the text that every request must get."""
        while len(text) < spec.max_length:
            text += (self.draw(text, spec),)
            if text[-1] in spec.stop_token_ids:
                break
        return text


class Settled:
    """What each sequence will be in the end. A tier that believes anything else of its settled part is in error."""

    def __init__(self) -> None:
        self.text: dict[int, Tokens] = {}

    def check(self, sequence_id: int, held: list[int], end: int) -> None:
        assert tuple(held[:end]) == self.text[sequence_id][:end], f"a tier works on a wrong text before {end}"


class ToyTier:
    """A Verifier over a table; holds sequences as last stated, by the align rule."""

    def __init__(self, law: Law, tier: Tier, settled: Settled) -> None:
        self.law, self.tier, self.settled = law, tier, settled
        self.held: dict[int, list[int]] = {}
        self.specs: dict[int, SequenceSpec] = {}

    def align(self, span: Span) -> int | None:
        """None, or from where the sequence is missing."""
        if span.start == 0:
            assert span.spec is not None, "a span from 0 carries the spec"
            self.specs[span.sequence_id] = span.spec
        held = self.held.setdefault(span.sequence_id, []) if span.start == 0 else self.held.get(span.sequence_id, [])
        if span.start > len(held):
            return len(held)
        held[span.start :] = span.tokens
        if self.tier != Tier.DRAFT:  # what the retrieval tier tells it may turn out wrong, and is then told anew
            self.settled.check(span.sequence_id, held, span.start)
        return None

    def verify(self, claims: list[Claim]) -> list[Verdict]:
        assert len({c.span.sequence_id for c in claims}) == len(claims), "one claim a sequence"
        return [self.judge(c) for c in claims]

    def judge(self, claim: Claim) -> Verdict:
        if (missing := self.align(claim.span)) is not None:
            return Verdict(missing_from=missing)
        if not claim.sample:
            return Verdict()
        sequence_id = claim.span.sequence_id
        held = self.held[sequence_id]
        held += claim.proposed
        spec = self.specs[sequence_id]
        own = [self.law.draw(tuple(held[:end]), spec) for end in range(claim.span.end, len(held) + 1)]
        return judge(own, claim, spec)

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.held.pop(sequence_id, None)
            self.specs.pop(sequence_id, None)


class ToyTarget(ToyTier):
    """Also the engine's pool, from which snapshots are cut."""

    def __init__(self, law: Law, settled: Settled, num_slots: int) -> None:
        super().__init__(law, Tier.TARGET, settled)
        self.allocator = RangeAllocator(num_slots)
        self.ranges: dict[int, Any] = {}
        self.cuts = itertools.count(1)

    def can_open(self, spec: SequenceSpec) -> bool:
        return spec.max_length <= self.allocator.num_free

    def open(self, sequence_id: int, spec: SequenceSpec) -> None:
        self.ranges[sequence_id] = self.allocator.allocate(spec.max_length)
        assert self.ranges[sequence_id] is not None, "admitted without room"

    def cut(self, sequence_id: int, position: int, chunks: ChunkSettings, selector: MeanKey, base: int) -> Snapshot:
        assert 0 < position <= len(self.held[sequence_id]), "a snapshot is cut of what is held"
        self.settled.check(sequence_id, self.held[sequence_id], position)
        return Snapshot(sequence_id, next(self.cuts), position, torch.empty(0), torch.empty(0))

    def release(self, sequence_ids: list[int]) -> None:
        super().release(sequence_ids)
        for sequence_id in sequence_ids:
            self.allocator.free(self.ranges.pop(sequence_id, []))


class ToyRetrieval(ToyTier):
    """Works only with a snapshot, and only `tail` tokens beyond it."""

    def __init__(self, law: Law, settled: Settled, tail: int, events: Counter[str]) -> None:
        super().__init__(law, Tier.RETRIEVAL, settled)
        self.tail, self.events = tail, events
        self.position: dict[int, int] = {}

    def judge(self, claim: Claim) -> Verdict:
        if (missing := self.align(claim.span)) is not None:
            return Verdict(missing_from=missing)
        position = self.position.get(claim.span.sequence_id)
        if position is None or claim.span.end + len(claim.proposed) - position > self.tail:
            self.events["retrieval: tail full" if position else "retrieval: no snapshot yet"] += 1
            return Verdict(snapshot_wanted=True)
        if claim.span.end - 1 < position:
            self.events["retrieval: late statement"] += 1
            return Verdict()
        return super().judge(claim)

    def release(self, sequence_ids: list[int]) -> None:
        super().release(sequence_ids)
        for sequence_id in sequence_ids:
            self.position.pop(sequence_id, None)


class ToyDrafts:
    """The leaf."""

    def __init__(self, tier: ToyTier) -> None:
        self.tier = tier
        self.waiting: dict[int, Work] = {}
        self.texts: dict[tuple[int, int], Tokens] = {}  # what was continued, by sequence and length

    def submit(self, work: list[Work]) -> None:
        for w in work:
            replaced = self.waiting.get(w.span.sequence_id)
            span = in_turn(replaced.span, w.span) if replaced else w.span
            self.waiting[w.span.sequence_id] = replace(w, span=span)

    def collect(self, timeout_s: float) -> list[Proposal]:
        work, self.waiting = self.waiting, {}
        return [self.draft(w.span, w.lookaheads) for w in work.values()]

    def draft(self, span: Span, lookaheads: tuple[int, ...]) -> Proposal:
        assert len(lookaheads) == 1, "the leaf is the last level"
        if (missing := self.tier.align(span)) is not None:
            return Proposal(span.sequence_id, span.end, missing_from=missing)
        tokens: Tokens = ()
        held, spec = self.tier.held[span.sequence_id], self.tier.specs[span.sequence_id]
        self.texts[span.sequence_id, span.end] = tuple(held)
        while len(tokens) < lookaheads[0] and len(held) < spec.max_length and not ends(tokens, spec):
            tokens += (self.tier.law.draw(tuple(held), spec),)
            held.append(tokens[-1])
        return Proposal(span.sequence_id, span.end, tokens, bytes(len(tokens)), tallies=(Tally(),))

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.waiting.pop(sequence_id, None)
        self.tier.release(sequence_ids)


class SlowSink:
    """Hands snapshots over some turns later, to whatever retrieval tier lives by then; some never arrive."""

    def __init__(self, rng: random.Random, faults: float) -> None:
        self.rng, self.faults = rng, faults
        self.retrieval: ToyRetrieval | None = None
        self.on_the_way: dict[int, list[int]] = {}  # sequence → turns left, position

    def deliver(self, snapshot: Snapshot) -> None:
        self.on_the_way[snapshot.sequence_id] = [self.rng.choice([0, 0, 1, 5]), snapshot.position]

    def in_flight(self, sequence_id: int) -> bool:
        return sequence_id in self.on_the_way

    def confirmed(self, sequence_id: int) -> int:
        return 0

    def turn(self) -> None:
        for sequence_id, way in list(self.on_the_way.items()):
            way[0] -= 1
            if way[0] < 0:
                del self.on_the_way[sequence_id]
                if self.retrieval is not None and self.rng.random() >= self.faults:
                    self.retrieval.position[sequence_id] = way[1]


class CountingTier:
    """A Verifier that counts what became of proposals, and whether `drafts` continued the text that is judged."""

    def __init__(self, verifier: ToyTier, events: Counter[str], drafts: Callable[[], ToyDrafts | None]) -> None:
        self.verifier, self.tier, self.events, self.drafts = verifier, verifier.tier, events, drafts

    def verify(self, claims: list[Claim]) -> list[Verdict]:
        verdicts = self.verifier.verify(claims)
        for claim, verdict in zip(claims, verdicts, strict=True):
            if claim.sample and verdict.tokens:
                accepted = verdict.num_accepted
                of = "all" if accepted == len(claim.proposed) else "some" if accepted else "none"
                self.events[f"{self.tier.name}: accepted {of} of {'some' if claim.proposed else 'none'}"] += 1
                end, drafts = claim.span.end, self.drafts()
                text = drafts and drafts.texts.get((claim.span.sequence_id, end))
                if claim.proposed and text is not None:
                    same = text == tuple(self.verifier.held[claim.span.sequence_id][:end])
                    self.events[f"draft: continued {'the' if same else 'another'} text"] += 1
            if verdict.missing_from is not None:
                self.events[f"{self.tier.name}: tokens missing"] += 1
        return verdicts

    def release(self, sequence_ids: list[int]) -> None:
        self.verifier.release(sequence_ids)


class CountingRunAhead(RunAhead):
    """Counts what became of the guesses."""

    def __init__(self, decoder: SpeculativeDecoder, below: int, events: Counter[str]) -> None:
        super().__init__(decoder, below)
        self.events = events

    def submit(self, work: list[Work]) -> None:
        guessed = {i for i, guess in self.guesses.items() if guess.tokens}
        super().submit(work)
        for w in work:
            if w.span.sequence_id in guessed:
                found = any(b.work is w for b in self.found)
                block = self.decoder.blocks.get(w.span.sequence_id)
                begun = block is not None and bool(block.tokens)
                self.events[f"run-ahead: {'whole block found' if found else 'begun' if begun else 'in vain'}"] += 1


class Chain:
    """Three tiers in one of many arrangements, an engine on top, and some requests."""

    def __init__(self, run: int, micro_batches: int, events: Counter[str], *, guessing: bool = False) -> None:
        rng = self.rng = random.Random(run)
        self.guessing = guessing  # make guesses frequent, and often right
        self.settled, self.events, self.micro_batches = Settled(), events, micro_batches
        self.law = Law(run)
        self.retrieval_law = Law(run + 10_000, self.law, 0.99 if guessing else rng.choice([0.2, 0.9, 0.99]))
        self.draft_law = Law(run + 20_000, self.law, rng.choice([0.0, 0.6, 0.95, 1.0]))
        self.faults = rng.choice([0, 0, 0.02] if guessing else [0, 0, 0.02, 0.1, 0.3])
        self.patience, self.tail = rng.choice([3, 30]), rng.choice([4, 25, 1000])
        self.sink = SlowSink(rng, self.faults)
        self.drafts: ToyDrafts | None = None
        self.target = ToyTarget(self.law, self.settled, rng.choice([70, 200]))
        self.top = SpeculativeDecoder(
            self.link(self.make_retrieval), CountingTier(self.target, events, lambda: None), micro_batches=micro_batches
        )
        self.engine = Engine(
            self.top,
            Scheduler(self.target, max_sequences=rng.choice([1, 3, 8]), prefill_chunk=rng.choice([2, 5, 100])),  # type: ignore[arg-type]
            SnapshotPolicy(self.target, self.sink, ChunkSettings(), MeanKey(), rng.choice([3, 10, 1000])),  # type: ignore[arg-type]
            Limits(64, self.target.allocator.num_slots, VOCAB),
        )

    def link(self, make_peer: Any) -> Proposer:
        """The peer itself, or a link to it."""
        if self.faults == 0 and self.rng.random() < 0.5:
            return make_peer()  # type: ignore[no-any-return]
        return LossyLink(make_peer, self.rng, self.events, faults=self.faults, patience=self.patience)

    def make_retrieval(self) -> Proposer:
        retrieval = self.sink.retrieval = ToyRetrieval(self.retrieval_law, self.settled, self.tail, self.events)
        verifier = CountingTier(retrieval, self.events, lambda: self.drafts)
        decoder = SpeculativeDecoder(self.link(self.make_drafts), verifier, micro_batches=self.micro_batches)
        if self.guessing or self.rng.random() < 0.7:
            return CountingRunAhead(decoder, 100 if self.guessing else self.micro_batches, self.events)
        return decoder

    def make_drafts(self) -> Proposer:
        self.drafts = ToyDrafts(ToyTier(self.draft_law, Tier.DRAFT, self.settled))
        return self.drafts

    def request(self) -> tuple[Request, Tokens]:
        """A random request, and the text that it must end as."""
        rng = self.rng
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 1, 2, rng.randint(3, 24)])))
        request = Request(
            prompt,
            max_tokens=rng.choice([1, 2, 5, 40]),
            sampling=SamplingParams(rng.choice([0, 0.6, 1.0, 1.3])),
            seed=rng.randrange(10**6),
            lookaheads=(rng.choice([0, 1, 4, 8]), rng.choice([0, 1, 3])),
            stop_token_ids=rng.choice([(), (), (0,), (0, 3)]),
        )
        spec = SequenceSpec(
            request.sampling, request.seed, len(prompt), len(prompt) + request.max_tokens, request.stop_token_ids
        )
        text = self.law.plain(prompt, spec)
        if rng.random() < 0.3:  # some of the output was emitted elsewhere
            request = replace(request, resume=text[len(prompt) : rng.randint(len(prompt), len(text) - 1)])
        return request, text

    def run(self) -> None:
        wanted: dict[int, tuple[Request, Tokens]] = {}
        got: dict[int, Tokens] = {}
        origins: Counter[int] = Counter()
        unfinished: set[int] = set()
        for _ in range(self.rng.randint(1, 5)):
            request, text = self.request()
            sequence_id = self.engine.submit(request)
            self.settled.text[sequence_id], wanted[sequence_id], got[sequence_id] = text, (request, text), ()
            unfinished.add(sequence_id)
        for turn in itertools.count():
            if not unfinished:
                break
            assert turn < 20_000, "the engine does not come to an end"
            if self.faults and self.rng.random() < 0.02:
                self.engine.cancel(self.rng.choice(sorted(wanted)))
            for output in self.engine.run_once(0.0):
                sequence_id = output.sequence_id
                request, text = wanted[sequence_id]
                got[sequence_id] += output.tokens
                assert len(output.origins) == len(output.tokens)
                assert all(origin == Tier.TARGET or request.lookaheads[1 - origin] for origin in output.origins)
                origins[sequence_id] += sum(origin != Tier.TARGET for origin in output.origins)
                so_far = request.prompt + request.resume + got[sequence_id]
                assert so_far == text[: len(so_far)], f"request {request}"
                assert output.stats.tallies[0].accepted == origins[sequence_id]
                assert output.stats.decoded == len(got[sequence_id])
                if output.finish_reason is not None:
                    unfinished.remove(sequence_id)
                    cancelled = output.finish_reason is FinishReason.CANCELLED
                    self.events["engine: request cancelled"] += cancelled
                    assert cancelled or so_far == text
                    stopped = text[-1] in request.stop_token_ids
                    assert cancelled or (output.finish_reason is FinishReason.STOP) == stopped
            self.sink.turn()
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        """Every tier has forgotten every request."""
        assert self.engine.idle
        assert not self.top.blocks
        assert not self.top.asked
        assert not self.target.held
        assert self.target.allocator.num_free == self.target.allocator.num_slots
        assert self.sink.retrieval is not None
        assert not self.sink.retrieval.held
        assert self.drafts is not None
        assert not self.drafts.tier.held


RUNS = 300
GUESSES = ["run-ahead: whole block found", "run-ahead: begun", "run-ahead: in vain"]
EXPECTED = [
    *(f"{tier}: accepted {of} of some" for tier in ("TARGET", "RETRIEVAL") for of in ("all", "some", "none")),
    *(f"{tier}: accepted all of none" for tier in ("TARGET", "RETRIEVAL")),
    "RETRIEVAL: tokens missing",
    "retrieval: tail full",
    "retrieval: no snapshot yet",
    "link: work lost",
    "link: answer lost",
    "link: answer twice",
    "link: answer late or repeated",
    "link: gave up waiting",
    "link: peer restarted",
    "engine: request cancelled",
]


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_every_request_gets_the_tokens_of_plain_decoding(micro_batches: int) -> None:
    events: Counter[str] = Counter()
    for run in range(RUNS):
        chain = Chain(run, micro_batches, events)
        try:
            chain.run()
        except AssertionError as error:
            raise AssertionError(f"run {run}: {error}") from error
    assert events["draft: continued another text"] < 0.04 * events["draft: continued the text"]  # late answers only
    assert not [e for e in EXPECTED if events[e] < 20], f"too rare to prove anything: {events}"


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_guesses_change_no_token(micro_batches: int) -> None:
    events: Counter[str] = Counter()
    for run in range(3 * RUNS):
        Chain(run, micro_batches, events, guessing=True).run()
    assert events["draft: continued another text"] < 0.04 * events["draft: continued the text"]
    assert not [e for e in GUESSES if events[e] < 30], f"too rare to prove anything: {events}"
