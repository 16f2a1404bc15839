"""The one loop: a verifying tier over a proposer, itself a proposer, so that tiers nest (architecture, section 2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from triforce_core.messages import Claim, Proposal, Proposer, Span, Tally, Tier, Verdict, Work


class Verifier(Protocol):
    """A model that judges proposals."""

    tier: Tier

    def verify(self, claims: list[Claim]) -> list[Verdict]:
        """One verdict a claim, in order."""
        ...

    def release(self, sequence_ids: list[int]) -> None: ...


@dataclass(slots=True)
class Block:
    """What this tier has so far in answer to `work`."""

    work: Work
    tokens: tuple[int, ...] = ()
    origins: bytes = b""
    missing_from: int | None = None
    snapshot_wanted: bool = False
    tallies: list[Tally] = field(default_factory=list)  # of this level, then of those below
    told: int | None = None  # the level below is believed to hold the sequence up to here; None: only the work's start

    @property
    def span(self) -> Span:
        return self.work.span.extended(self.tokens)

    def state_below(self) -> Work:
        """What the level below must continue, stating only what it was not told in this block's earlier rounds."""
        span, start = self.span, self.work.span.start
        if self.told is not None and self.told > start:
            span = Span(span.sequence_id, self.told, span.tokens[self.told - start :])
        self.told = span.end
        return Work(span, self.below)

    @property
    def below(self) -> tuple[int, ...]:
        return self.work.lookaheads[1:]

    def add_tallies(self, tallies: list[Tally]) -> None:
        self.tallies += [Tally()] * (len(tallies) - len(self.tallies))
        for level, tally in enumerate(tallies):
            self.tallies[level] += tally

    def answer(self) -> Proposal:
        return Proposal(
            sequence_id=self.work.span.sequence_id,
            start=self.work.span.end,
            tokens=self.tokens,
            origins=self.origins,
            missing_from=self.missing_from,
            snapshot_wanted=self.snapshot_wanted,
            tallies=tuple(self.tallies),
        )


class SpeculativeDecoder:
    """Collects proposals of the level below, verifies them, and asks again until a block is long enough to hand up.

    With `wait_for_all` a round waits for every answer that it asked for (sequential mode); otherwise it takes what is
    ready. Not thread-safe: one thread drives a decoder.
    """

    def __init__(self, proposer: Proposer, verifier: Verifier, *, wait_for_all: bool = True) -> None:
        self.proposer, self.verifier, self.wait_for_all = proposer, verifier, wait_for_all
        self.blocks: dict[int, Block] = {}
        self.asked: set[int] = set()  # sequences that the level below still owes an answer
        self.unasked: list[Proposal] = []  # the empty answers of sequences for which it is not asked

    def submit(self, work: list[Work]) -> None:
        blocks = {w.span.sequence_id: Block(w) for w in work}
        self.blocks.update(blocks)
        self.asked -= blocks.keys()  # replaced work is not waited for
        self.unasked = [p for p in self.unasked if p.sequence_id not in blocks]
        self._ask(list(blocks.values()))

    def _ask(self, blocks: list[Block]) -> None:
        """Send the level below what it must continue; where it has no part, its answer is empty at once."""
        asked = [b for b in blocks if b.work.sample and any(b.below)]
        self.unasked += [
            Proposal(b.span.sequence_id, b.span.end) for b in blocks if not (b.work.sample and any(b.below))
        ]
        self.asked |= {b.span.sequence_id for b in asked}
        if asked:
            self.proposer.submit([b.state_below() for b in asked])

    def collect(self, timeout_s: float) -> list[Proposal]:
        """Run one round over what is ready; returns the blocks that it completed, which may be none."""
        ready = self._arrivals(timeout_s)
        skipped = [(b, p) for b, p in ready if b.work.lookaheads[0] == 0]
        verified = [(b, p) for b, p in ready if b.work.lookaheads[0] > 0]

        done: list[Block] = []
        again: list[Block] = []
        for block, proposal in skipped:
            self._pass_through(block, proposal)
            done.append(block)
        claims = [Claim(block.span, proposal.tokens, block.work.sample) for block, proposal in verified]
        verdicts = self.verifier.verify(claims) if claims else []
        for (block, proposal), verdict in zip(verified, verdicts, strict=True):
            (done if self._extend(block, proposal, verdict) else again).append(block)
        for block in done:
            del self.blocks[block.work.span.sequence_id]
        self._ask(again)
        return [block.answer() for block in done]

    def _arrivals(self, timeout_s: float) -> list[tuple[Block, Proposal]]:
        """The proposals that are ready, each with the block that it continues; late ones are dropped."""
        arrived, self.unasked = self._matched(self.unasked), []
        while self.asked:
            answers = self.proposer.collect(0.0 if arrived and not self.wait_for_all else timeout_s)
            for block, proposal in self._matched(answers):
                if proposal.sequence_id in self.asked:  # not again, should an answer be repeated
                    self.asked.remove(proposal.sequence_id)
                    arrived.append((block, proposal))
            if not self.wait_for_all:
                break
        return arrived

    def _matched(self, proposals: list[Proposal]) -> list[tuple[Block, Proposal]]:
        pairs = [(self.blocks.get(p.sequence_id), p) for p in proposals]
        return [(block, p) for block, p in pairs if block is not None and block.span.end == p.start]

    def _pass_through(self, block: Block, proposal: Proposal) -> None:
        """This tier is skipped: what comes from below goes up as it is."""
        block.tokens, block.origins = proposal.tokens, proposal.origins
        block.missing_from, block.snapshot_wanted = proposal.missing_from, proposal.snapshot_wanted
        block.add_tallies([Tally(), *proposal.tallies])

    def _extend(self, block: Block, proposal: Proposal, verdict: Verdict) -> bool:
        """Add what one verified round gave; True when the block can be handed up."""
        own = bytes([self.verifier.tier]) * (len(verdict.tokens) - verdict.num_accepted)
        block.tokens += verdict.tokens
        block.origins += proposal.origins[: verdict.num_accepted] + own
        lacks = [p for p in (proposal.missing_from, verdict.missing_from) if p is not None]
        block.missing_from = min(lacks, default=None)
        if proposal.missing_from is not None:
            block.told = proposal.missing_from
        block.snapshot_wanted |= proposal.snapshot_wanted or verdict.snapshot_wanted
        rejected = verdict.num_accepted < len(proposal.tokens) and verdict.num_accepted < len(verdict.tokens)
        tally = Tally(int(block.work.sample), len(proposal.tokens), verdict.num_accepted, int(rejected))
        block.add_tallies([tally, *proposal.tallies])
        stuck = not verdict.tokens  # a prefill chunk, or this tier lacks something: only the level above can go on
        # What is missing from the start of our work on the next round states; what is before it, the level above must.
        lacking = block.missing_from is not None and block.missing_from < block.work.span.start
        return stuck or verdict.ended or lacking or len(block.tokens) >= block.work.lookaheads[0]

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.blocks.pop(sequence_id, None)
        self.asked.difference_update(sequence_ids)
        self.proposer.release(sequence_ids)
        self.verifier.release(sequence_ids)
