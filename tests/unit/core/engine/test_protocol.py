"""The protocol on toy models: whatever delays, losses and restarts do, the output is that of plain seeded decoding.

The real Engine, Scheduler, SnapshotSchedule and SpeculativeDecoder drive tiers whose models are tables, over links that
misbehave.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.lossy_link import LossyLink
from tests.toy_tiers import VOCAB, Law, Settled, SlowSink, Tokens, ToyDrafts, ToyRetrieval, ToyTarget, ToyTier
from triforce_core.engine.engine import Engine, SnapshotSchedule
from triforce_core.engine.limits import Limits
from triforce_core.engine.scheduler import Scheduler
from triforce_core.engine.sequence import FinishReason, Request
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.messages import Claim, Proposer, SamplingParams, SequenceSpec, Tier, Verdict, Work
from triforce_core.speculation.decoder import Block, SpeculativeDecoder, State
from triforce_core.speculation.run_ahead import RunAhead


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
                first = claim.tree.first_path().tokens
                siblings = claim.parents and verdict.tokens[:accepted] != first[:accepted]
                self.events[f"{self.tier.name}: accepted siblings"] += bool(siblings)
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


class CountingDecoder(SpeculativeDecoder):
    """Counts the blocks that are handed up before they are long enough."""

    events: Counter[str]

    def _early(self) -> Block | None:
        early = super()._early()
        self.events["retrieval: block handed up early"] += early is not None
        return early


class CountingRunAhead(RunAhead):
    """Counts what became of the guesses."""

    def __init__(self, decoder: SpeculativeDecoder, below: int, events: Counter[str]) -> None:
        super().__init__(decoder, below)
        self.events = events

    def submit(self, work: list[Work]) -> None:
        blocks = self.decoder.blocks
        guessed = {i for i, block in blocks.items() if block.tokens and not block.owed}
        super().submit(work)
        for w in work:
            if w.span.sequence_id in guessed:
                block = blocks[w.span.sequence_id]
                found, begun = block.state is State.DONE, bool(block.tokens)
                self.events[f"run-ahead: {'whole block found' if found else 'begun' if begun else 'in vain'}"] += 1


class CountingEngine(Engine):
    """Tells the ids under which preempted requests go on."""

    def __init__(self, *args: Any, settled: Settled, events: Counter[str]) -> None:
        super().__init__(*args)
        self.settled, self.events = settled, events
        self.preempted_at: dict[int, int] = {}  # by request: how many tokens of its output it had, if any

    def _make_room(self) -> None:
        super()._make_room()
        for sequence in self.scheduler.queue:
            if sequence.sequence_id not in self.settled.text:
                self.settled.text[sequence.sequence_id] = self.settled.text[sequence.request_id]
                self.events["engine: request preempted"] += 1
                if sequence.has_output:
                    given = len(sequence.request.prompt) + len(sequence.request.resume)
                    self.preempted_at[sequence.request_id] = len(sequence.tokens) - given


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
        self.target = ToyTarget(self.law, self.settled, rng.choice([65, 200]))
        self.top = SpeculativeDecoder(
            self.link(self.make_retrieval), CountingTier(self.target, events, lambda: None), micro_batches=micro_batches
        )
        self.engine = CountingEngine(
            self.top,
            Scheduler(
                self.target,
                max_sequences=rng.choice([1, 3, 8, 8]),
                prefill_chunk=rng.choice([2, 5, 100]),
                step_ahead=rng.choice([1, 1, 4, 256]),
            ),
            SnapshotSchedule(self.target, self.sink, ChunkSettings(), "mean_key", rng.choice([3, 10, 1000])),  # type: ignore[arg-type]
            Limits(64, self.target.allocator.num_slots, VOCAB),
            settled=self.settled,
            events=events,
        )

    def link(self, make_peer: Any) -> Proposer:
        """The peer itself, or a link to it."""
        if self.faults == 0 and self.rng.random() < 0.5:
            return make_peer()  # type: ignore[no-any-return]
        return LossyLink(make_peer, self.rng, self.events, faults=self.faults, patience=self.patience)

    def make_retrieval(self) -> Proposer:
        retrieval = self.sink.retrieval = ToyRetrieval(self.retrieval_law, self.settled, self.tail, self.events)
        verifier = CountingTier(retrieval, self.events, lambda: self.drafts)
        decoder = CountingDecoder(
            self.link(self.make_drafts),
            verifier,
            micro_batches=self.micro_batches,
            hand_up_early=self.micro_batches > 1,
        )
        decoder.events = self.events
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
            max_tokens=rng.choice([1, 2, 5, 40, 40]),
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
        for _ in range(self.rng.randint(1, 8)):
            request, text = self.request()
            sequence_id = self.engine.submit(request)
            sequence = self.engine.arrivals[-1]
            sequence.plan = sequence.plan._replace(nodes=self.rng.choice([0, 0, 4, 9]))
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
                assert output.stats.preempted <= 1
                length = len(got[sequence_id])
                again = length > self.engine.preempted_at.get(sequence_id, length)  # the first token after a preemption
                assert output.stats.decoded == max(0, length - 1) - again, "the first token is the prefill's"
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
    "RETRIEVAL: accepted siblings",
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
    "engine: request preempted",
]


@pytest.mark.parametrize(
    "micro_batches", [pytest.param(1, marks=pytest.mark.ci), 3, pytest.param(2, marks=pytest.mark.slow)]
)
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
    assert (events["retrieval: block handed up early"] > 20) == (micro_batches > 1)


@pytest.mark.parametrize("micro_batches", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_guesses_change_no_token(micro_batches: int) -> None:
    events: Counter[str] = Counter()
    for run in range(3 * RUNS):
        Chain(run, micro_batches, events, guessing=True).run()
    assert events["draft: continued another text"] < 0.04 * events["draft: continued the text"]
    assert not [e for e in GUESSES if events[e] < 30], f"too rare to prove anything: {events}"
