"""The speculative decoding loop: verifies proposals of the level below and is itself a proposer, so that tiers nest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from math import ceil
from time import perf_counter
from typing import Protocol

from triforce_core.messages import Claim, Origin, Proposal, Proposer, Span, Tally, Tier, TokenLogprobs, Verdict, Work


class Verifier(Protocol):
    """A model that verifies proposals."""

    tier: Tier

    def verify(self, claims: list[Claim]) -> list[Verdict]:
        """One verdict per claim, in order."""
        ...

    def release(self, sequence_ids: list[int]) -> None: ...


class State(Enum):
    """What happens next to a block."""

    TO_ASK = "the level below is asked to continue it"
    ASKED = "the level below answers"
    READY = "its proposal is verified"
    DONE = "it is handed up, if the level above waits for it"


@dataclass(slots=True)
class Block:
    """A tier's state of one sequence: the work, the tokens found so far, and what happens next."""

    work: Work
    owed: bool = True  # False: the level above does not wait for an answer (see run_ahead.py)
    state: State = State.TO_ASK
    proposal: Proposal | None = None  # from the level below; set while READY
    arrival: int = 0  # order of the proposal's arrival: the oldest is verified first
    tokens: tuple[int, ...] = ()
    origins: bytes = b""
    missing_from: int | None = None
    snapshot_wanted: bool = False
    ended: bool = False  # the last token ends the sequence
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    no_token: bool = False  # no token can follow
    tallies: list[Tally] = field(default_factory=list)  # of this level, then of the levels below
    # The position at which the last verified proposal began: this tier's model holds the text before that position.
    # None: not known, so the whole work is stated.
    model_holds: int | None = None
    # The level below holds the text before this position. None: not known.
    below_holds: int | None = None

    @property
    def sequence_id(self) -> int:
        return self.work.span.sequence_id

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.work.span.end + len(self.tokens)

    @property
    def asks_below(self) -> bool:
        return self.work.sample and any(self.work.lookaheads[1:])

    @property
    def long_enough(self) -> bool:
        return self.ended or len(self.tokens) >= self.work.lookaheads[0]

    @property
    def settled(self) -> int:
        """The position up to which the level above has decided the text.

        For a guess (run_ahead.py) this is the start of its span: the span is the block just handed up, and the level
        above may still reject tokens of it.
        """
        return self.work.span.end if self.owed else self.work.span.start

    def claim(self, proposal: Proposal) -> Claim:
        """The claim for this tier's model.

        Its text starts at `model_holds` or `settled`, whichever is smaller. So the text before a claim's start
        is final: the level above replaces text only from `settled` on, and a claim starts there or
        earlier. The protocol tests check this.
        """
        held = None if self.model_holds is None else min(self.model_holds, self.settled)
        return Claim(self.statement(held), proposal.tokens, self.work.sample, proposal.parents)

    def statement(self, held: int | None) -> Span:
        """The text of the work and this block from `held` on, without the earlier text, which may be a long prompt."""
        given = self.work.span
        if held is None or held <= given.start:
            return given.extended(self.tokens)
        if held < given.end:
            return Span(given.sequence_id, held, given.tokens[held - given.start :] + self.tokens)
        return Span(given.sequence_id, held, self.tokens[held - given.end :])

    def add_tallies(self, tallies: list[Tally]) -> None:
        self.tallies += [Tally()] * (len(tallies) - len(self.tallies))
        for level, tally in enumerate(tallies):
            self.tallies[level] += tally

    def answer(self) -> Proposal:
        end = self.work.span.end
        # If only text from `end` on is missing, nothing is reported: the next work states the text from there anyway.
        missing_from = None if self.missing_from is None or self.missing_from >= end else self.missing_from
        return Proposal(
            sequence_id=self.sequence_id,
            start=end,
            tokens=self.tokens,
            origins=self.origins,
            missing_from=missing_from,
            snapshot_wanted=self.snapshot_wanted,
            tallies=tuple(self.tallies),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            no_token=self.no_token,
        )

    def continuation(self) -> Block:
        """The block that follows if the level above accepts this one whole. No work asks for it yet (run_ahead.py)."""
        given, (lookahead, *below) = self.work.span, self.work.lookaheads
        whole = bool(self.tokens) and lookahead > 0 and not self.ended and self.missing_from is None
        text = Span(given.sequence_id, given.end, self.tokens)
        return Block(
            # The level above adds one token to an accepted block. The guess includes this token, so one more is asked.
            replace(self.work, span=text, lookaheads=(lookahead + 1, *below)),
            owed=False,
            state=State.TO_ASK if whole else State.DONE,
            model_holds=self.model_holds,
            below_holds=self.below_holds,
        )


class SpeculativeDecoder:
    """Collects proposals of the level below, verifies them, and asks again until a block can be handed up. One thread
    drives it.

    With one micro-batch, a round waits for all requested proposals. With more, it verifies at most one micro-batch of
    those that have arrived, oldest first, while the level below works on the others. `hand_up_early`: where the levels
    work at the same time, a block may be handed up before it is long enough, when the level above has nothing to
    verify.
    """

    def __init__(
        self, proposer: Proposer, verifier: Verifier, *, micro_batches: int = 1, hand_up_early: bool = False
    ) -> None:
        self.proposer, self.verifier = proposer, verifier
        self.micro_batches, self.hand_up_early = micro_batches, hand_up_early
        self.blocks: dict[int, Block] = {}  # by sequence id; one for every sequence until it is released
        self.arrivals = itertools.count()
        # Called before each pass with the ids of its sequences, and after it with an empty list.
        self.passing: Callable[[list[int]], None] = lambda sequence_ids: None

    @property
    def owed(self) -> list[Block]:
        """The blocks that the level above waits for."""
        return [block for block in self.blocks.values() if block.owed]

    def submit(self, work: list[Work]) -> None:
        self.resume([Block(w) for w in work])

    def resume(self, blocks: list[Block]) -> None:
        """Start work on these blocks, which replace the blocks of the same sequences. They may already hold tokens."""
        self.blocks.update({block.sequence_id: block for block in blocks})
        self._ask(blocks)

    def collect(self, timeout_s: float) -> list[Proposal]:
        """Hand up the blocks that are done, possibly none; first run one round unless a block is ready to hand up."""
        owed = self.owed
        if not any(block.state is State.DONE for block in owed):
            if early := self._early():
                early.state = State.DONE
            else:
                self.advance(owed, timeout_s)
        return [self._hand_up(block) for block in owed if block.state is State.DONE]

    def advance(self, blocks: list[Block], timeout_s: float) -> None:
        """Run one round over the `blocks` that are ready. With micro-batches it waits at most `timeout_s` for some."""
        self._ask(blocks)
        self._take_arrivals(blocks, timeout_s)
        taken = self._next_round(blocks)
        verified = []
        for block, proposal in taken:
            if block.work.lookaheads[0] == 0:
                self._pass_through(block, proposal)
            else:
                verified.append((block, proposal))
        claims = [block.claim(proposal) for block, proposal in verified]
        began = perf_counter()
        self.passing([claim.span.sequence_id for claim in claims])
        verdicts = self.verifier.verify(claims) if claims else []
        self.passing([])
        seconds = perf_counter() - began
        for (block, proposal), verdict in zip(verified, verdicts, strict=True):
            self._extend(block, proposal, verdict, seconds)

    def _ask(self, blocks: Iterable[Block]) -> None:
        """Ask the level below to continue these blocks; where it is skipped, the proposal is empty at once."""
        to_ask = [block for block in blocks if block.state is State.TO_ASK]
        work = []
        for block in to_ask:
            if block.asks_below:
                block.state = State.ASKED
                of_block, below = block.work, block.statement(block.below_holds)
                nodes = of_block.nodes if of_block.lookaheads[0] else 0  # what is handed up is no tree
                work.append(replace(of_block, span=below, lookaheads=of_block.lookaheads[1:], sample=True, nodes=nodes))
            else:
                self._ready(block, Proposal(block.sequence_id, block.end))
        if work:
            self.proposer.submit(work)

    def _ready(self, block: Block, proposal: Proposal) -> None:
        block.state, block.proposal, block.arrival = State.READY, proposal, next(self.arrivals)

    def _early(self) -> Block | None:
        """The block to hand up before it is long enough, or None.

        It is the longest block that has just grown, if it has at least half of the tokens asked for. Blocks are handed
        up early only while the level above waits for the blocks of all its sequences and so has nothing to do. The
        block of a single sequence is never handed up early: a short block would only delay the next block.
        """
        blocks = self.blocks.values()
        grown = [block for block in blocks if block.owed and block.state is State.TO_ASK]
        if not self.hand_up_early or not grown or len(blocks) < 2 or not all(block.owed for block in blocks):
            return None
        longest = max(grown, key=lambda block: len(block.tokens))
        return longest if 2 * len(longest.tokens) >= longest.work.lookaheads[0] else None

    def _take_arrivals(self, blocks: list[Block], timeout_s: float) -> None:
        """Assign arrived proposals to their blocks; late and repeated proposals are dropped."""
        while any(block.state is State.ASKED for block in blocks):
            idle = not any(block.state is State.READY for block in blocks)
            for proposal in self.proposer.collect(timeout_s if idle or self.micro_batches == 1 else 0.0):
                block = self.blocks.get(proposal.sequence_id)
                if block is not None and block.state is State.ASKED and block.end == proposal.start:
                    self._ready(block, proposal)
            if self.micro_batches > 1:
                break

    def _next_round(self, blocks: list[Block]) -> list[tuple[Block, Proposal]]:
        """The blocks of this round with their proposals, oldest proposal first.

        Blocks that skip this level or ask nothing of the level below are all taken. Of the other blocks, at most one
        micro-batch is taken.
        """
        room = ceil(sum(block.asks_below for block in self.blocks.values()) / self.micro_batches)
        taken = []
        for block in sorted(blocks, key=lambda block: block.arrival):
            judged = block.work.lookaheads[0] > 0
            if block.proposal is None or (judged and block.asks_below and not room):
                continue
            room -= judged and block.asks_below
            taken.append((block, block.proposal))
            block.proposal = None
        return taken

    def _pass_through(self, block: Block, proposal: Proposal) -> None:
        """Hand the proposal up unchanged, because the work skips this tier."""
        block.state = State.DONE
        block.tokens, block.origins = proposal.tokens, proposal.origins
        block.missing_from, block.snapshot_wanted = proposal.missing_from, proposal.snapshot_wanted
        block.add_tallies([Tally(), *proposal.tallies])

    def _extend(self, block: Block, proposal: Proposal, verdict: Verdict, seconds: float) -> None:
        """Add the tokens and tallies of one verified round, which took `seconds`, to the block."""
        own = bytes([self.verifier.tier]) * (len(verdict.tokens) - verdict.num_accepted)
        block.tokens += verdict.tokens
        block.origins += proposal.origins[: verdict.num_accepted] + own
        lacks = [p for p in (proposal.missing_from, verdict.missing_from) if p is not None]
        block.missing_from = min(lacks, default=None)
        block.model_holds = proposal.start
        block.below_holds = proposal.start if proposal.missing_from is None else proposal.missing_from
        block.snapshot_wanted |= proposal.snapshot_wanted or verdict.snapshot_wanted
        block.ended |= verdict.ended
        block.logprobs += verdict.logprobs
        block.prompt_logprobs += verdict.prompt_logprobs
        block.no_token |= verdict.no_token
        right = verdict.num_accepted
        # Where the verifier had no room to check all of a proposal, its own token may be the next proposed one.
        rejected = len(verdict.tokens) > right and proposal.tree.rejects(verdict.tokens[: right + 1])
        looked_up = bool(proposal.origins) and set(proposal.origins) == {Origin.LOOKUP}
        # A sequence that lacks tokens or a snapshot takes part in no pass. Then `seconds` is the time of a pass over
        # other sequences, or nearly 0.
        took_part = bool(verdict.tokens) or verdict.no_token or not block.work.sample
        tally = Tally(
            int(block.work.sample),
            len(proposal.tokens),
            verdict.num_accepted,
            int(rejected),
            verdict.num_accepted * looked_up,
            rejected * looked_up,
            passes=int(took_part),
            busy_s=seconds * took_part,
            drafts=int(took_part and bool(proposal.tokens) and not looked_up),
        )
        block.add_tallies([tally, *proposal.tallies])
        # A prefill chunk, or this tier lacks tokens or a snapshot, or no token can follow: the level above must act.
        stuck = not verdict.tokens or verdict.no_token
        # The next round can state missing text within the work; only the level above can state earlier text.
        lacking = block.missing_from is not None and block.missing_from < block.work.span.start
        block.state = State.DONE if stuck or lacking or block.long_enough else State.TO_ASK

    def _hand_up(self, block: Block) -> Proposal:
        self.blocks[block.sequence_id] = block.continuation()
        return block.answer()

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.blocks.pop(sequence_id, None)
        self.proposer.release(sequence_ids)
        self.verifier.release(sequence_ids)
