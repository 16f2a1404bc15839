"""The one loop: a verifying tier over a proposer, itself a proposer, so that tiers nest (architecture, section 2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil
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
    ended: bool = False  # the last token ends the sequence
    tallies: list[Tally] = field(default_factory=list)  # of this level, then of those below
    told: int | None = None  # up to where the level below has answered for; None: only what the level above told it
    ahead: bool = False  # nobody has asked for it yet (run_ahead.py)

    @property
    def span(self) -> Span:
        return self.work.span.extended(self.tokens)

    @property
    def below(self) -> tuple[int, ...]:
        return self.work.lookaheads[1:]

    @property
    def asks_below(self) -> bool:
        return self.work.sample and any(self.below)

    @property
    def long_enough(self) -> bool:
        return self.ended or len(self.tokens) >= self.work.lookaheads[0]

    def state_below(self) -> Work:
        """What the level below must continue, stating only what none of this block's answers shows it to hold."""
        span, start = self.span, self.work.span.start
        if self.told is not None and self.told > start:
            span = Span(span.sequence_id, self.told, span.tokens[self.told - start :])
        return Work(span, self.below)

    def add_tallies(self, tallies: list[Tally]) -> None:
        self.tallies += [Tally()] * (len(tallies) - len(self.tallies))
        for level, tally in enumerate(tallies):
            self.tallies[level] += tally

    def answer(self) -> Proposal:
        end = self.work.span.end
        # What is missing from there on is our own, and the next statement begins there at the latest.
        missing_from = None if self.missing_from is None or self.missing_from >= end else self.missing_from
        return Proposal(
            sequence_id=self.work.span.sequence_id,
            start=end,
            tokens=self.tokens,
            origins=self.origins,
            missing_from=missing_from,
            snapshot_wanted=self.snapshot_wanted,
            tallies=tuple(self.tallies),
        )


class SpeculativeDecoder:
    """Collects proposals of the level below, verifies them, and asks again until a block is long enough to hand up.

    With one micro-batch a round waits for every answer that it asked for and judges all of them (sequential mode). With
    more it takes what is ready, first come first judged, in one pass at most its share of the sequences that the level
    below works for, so that it has the others to work on meanwhile. With `hand_up_early`, for a level that works at the
    same time as the one above, a block need not be long enough when that one has nothing to judge.

    Not thread-safe: one thread drives a decoder.
    """

    def __init__(
        self, proposer: Proposer, verifier: Verifier, *, micro_batches: int = 1, hand_up_early: bool = False
    ) -> None:
        self.proposer, self.verifier = proposer, verifier
        self.micro_batches, self.hand_up_early = micro_batches, hand_up_early
        self.blocks: dict[int, Block] = {}
        self.asked: set[int] = set()  # sequences that the level below still owes an answer
        self.grown: list[int] = []  # sequences whose blocks the last round has extended; they need another
        self.unasked: list[Proposal] = []  # the empty answers of sequences for which it is not asked
        self.ready: dict[int, Proposal] = {}  # arrived and not judged, oldest first
        self.live: set[int] = set()  # sequences met and not released
        self.drafted: set[int] = set()  # of these, the ones that the level below works for

    def submit(self, work: list[Work]) -> None:
        self.resume([Block(w) for w in work])

    def resume(self, blocks: list[Block]) -> None:
        """Submit work of which a part may be done already."""
        ids = {b.work.span.sequence_id for b in blocks}
        self.withdraw(ids)  # replaced work is not waited for
        self.live |= ids
        self.drafted -= ids
        self.drafted |= {b.work.span.sequence_id for b in blocks if b.asks_below}
        self.blocks.update({b.work.span.sequence_id: b for b in blocks})
        self._ask(blocks)

    def retarget(self, blocks: list[Block]) -> None:
        """Go on with blocks in progress in answer to other work: their text is as it was, and so is what was asked."""
        self.blocks.update({b.work.span.sequence_id: b for b in blocks})

    def withdraw(self, sequence_ids: Iterable[int]) -> list[Block]:
        """Stop working on these, as if they had not been submitted; returns the unfinished blocks."""
        ids = set(sequence_ids)
        self.asked -= ids
        self.grown = [sequence_id for sequence_id in self.grown if sequence_id not in ids]
        self.unasked = [p for p in self.unasked if p.sequence_id not in ids]
        for sequence_id in ids & self.ready.keys():
            del self.ready[sequence_id]
        return [self.blocks.pop(sequence_id) for sequence_id in ids & self.blocks.keys()]

    def _ask(self, blocks: list[Block]) -> None:
        """Send the level below what it must continue; where it has no part, its answer is empty at once."""
        asked = [b for b in blocks if b.asks_below]
        self.unasked += [Proposal(b.span.sequence_id, b.span.end) for b in blocks if not b.asks_below]
        self.asked |= {b.span.sequence_id for b in asked}
        if asked:
            self.proposer.submit([b.state_below() for b in asked])

    def collect(self, timeout_s: float) -> list[Proposal]:
        return [block.answer() for block in self.collect_blocks(timeout_s)]

    def collect_blocks(self, timeout_s: float) -> list[Block]:
        """Run one round over what is ready; returns the blocks that it completed, which may be none."""
        if early := self._early():
            return self.withdraw([early.work.span.sequence_id])
        self._ask([self.blocks[sequence_id] for sequence_id in self.grown])
        self.grown = []
        self._take_arrivals(timeout_s)
        skipped, verified = self._next_round()
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
        self.grown = [b.work.span.sequence_id for b in again]
        return done

    def _early(self) -> Block | None:
        """The longest block that has just grown, if half done, where all of several sequences are in progress here: the
        level above has nothing to judge then. One by itself is left alone: this level would idle while it is judged.
        """
        here = {sequence_id for sequence_id, block in self.blocks.items() if not block.ahead}
        if not self.hand_up_early or not self.grown or len(here) < 2 or not self.live <= here:
            return None
        longest = max((self.blocks[sequence_id] for sequence_id in self.grown), key=lambda block: len(block.tokens))
        return longest if 2 * len(longest.tokens) >= longest.work.lookaheads[0] else None

    def _take_arrivals(self, timeout_s: float) -> None:
        """Put the proposals that have come into `ready`; late and repeated ones are dropped."""
        self._take(self.unasked)
        self.unasked = []
        while self.asked:
            answers = self.proposer.collect(timeout_s if self.micro_batches == 1 or not self.ready else 0.0)
            self._take([p for p in answers if p.sequence_id in self.asked])
            if self.micro_batches > 1:
                break

    def _take(self, proposals: list[Proposal]) -> None:
        for proposal in proposals:
            block = self.blocks.get(proposal.sequence_id)
            if block is not None and block.span.end == proposal.start:
                self.asked.discard(proposal.sequence_id)
                self.ready[proposal.sequence_id] = proposal

    def _next_round(self) -> tuple[list[tuple[Block, Proposal]], list[tuple[Block, Proposal]]]:
        """Of what is ready, oldest first: what goes up unjudged, and what the next pass judges."""
        skipped, verified = [], []
        room = ceil(len(self.drafted) / self.micro_batches)
        for sequence_id, proposal in list(self.ready.items()):
            block = self.blocks[sequence_id]
            if block.work.lookaheads[0] == 0:
                skipped.append((block, proposal))
            elif room or not block.asks_below:
                verified.append((block, proposal))
                room -= block.asks_below
            else:
                continue
            del self.ready[sequence_id]
        return skipped, verified

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
        block.told = proposal.start if proposal.missing_from is None else proposal.missing_from
        block.snapshot_wanted |= proposal.snapshot_wanted or verdict.snapshot_wanted
        block.ended |= verdict.ended
        rejected = verdict.num_accepted < len(proposal.tokens) and verdict.num_accepted < len(verdict.tokens)
        tally = Tally(int(block.work.sample), len(proposal.tokens), verdict.num_accepted, int(rejected))
        block.add_tallies([tally, *proposal.tallies])
        stuck = not verdict.tokens  # a prefill chunk, or this tier lacks something: only the level above can go on
        # What is missing from the start of our work on the next round states; what is before it, the level above must.
        lacking = block.missing_from is not None and block.missing_from < block.work.span.start
        return stuck or lacking or block.long_enough

    def release(self, sequence_ids: list[int]) -> None:
        self.withdraw(sequence_ids)
        self.live.difference_update(sequence_ids)
        self.drafted.difference_update(sequence_ids)
        self.proposer.release(sequence_ids)
        self.verifier.release(sequence_ids)
