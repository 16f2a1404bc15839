"""Drafting on while nobody waits: for a lone request, whose tiers would otherwise take turns."""

from __future__ import annotations

from dataclasses import replace

from triforce_core.decoder import Block, SpeculativeDecoder
from triforce_core.messages import Proposal, Span, Work


class RunAhead:
    """A decoder that, once its block is handed up, goes on as if the level above accepted all of it.

    The token that the level above adds to an accepted block is guessed too: it is the first that this level finds next.
    Work that agrees with the guess starts from what was found beyond it; any other finds it dropped. Guesses advance by
    one round a call and only while no work waits, so work waits for at most one round of them; and only while fewer
    than `below` sequences are live, for more keep every tier busy by themselves.
    """

    def __init__(self, decoder: SpeculativeDecoder, below: int) -> None:
        self.decoder, self.below = decoder, below
        self.live: set[int] = set()  # sequences met and not released
        self.owed: set[int] = set()  # those whose work is not answered
        self.found: list[Block] = []  # answers that were guessed already
        self.guesses: dict[int, Block] = {}  # of sequences that the level above is judging; paused, or long enough
        self.running: set[int] = set()  # guesses that the decoder is at

    @property
    def can_run_ahead(self) -> bool:
        """Whether `collect` has something to do though it owes no answer."""
        return not self.owed and bool(self.running or self._unfinished())

    def _unfinished(self) -> list[Block]:
        if len(self.live) >= self.below:
            return []
        return [b for b in self.guesses.values() if not b.long_enough]

    def submit(self, work: list[Work]) -> None:
        if not work:
            return
        found, begun, fresh = list[Block](), list[Block](), list[Block]()
        for w in work:
            sequence_id, block = w.span.sequence_id, self._head(w)
            if block.tokens and block.long_enough:
                found.append(block)
            elif block.tokens and sequence_id in self.running:  # what the level below was asked for is still wanted
                self.running.remove(sequence_id)
                begun.append(block)
            else:
                fresh.append(block)
        self._pause()
        ids = {w.span.sequence_id for w in work}
        self.live |= ids
        self.owed |= ids
        self.found = [b for b in self.found if b.work.span.sequence_id not in ids] + found
        self.decoder.retarget(begun)
        self.decoder.resume(fresh)

    def collect(self, timeout_s: float) -> list[Proposal]:
        if self.found:
            blocks, self.found = self.found, []
        elif self.owed:
            blocks = self.decoder.collect_blocks(timeout_s)
        else:
            blocks = []
            self._guess_on(timeout_s)
        self.owed -= {b.work.span.sequence_id for b in blocks}
        for block in blocks:
            if guess := guess_after(block):
                self.guesses[guess.work.span.sequence_id] = guess
        return [block.answer() for block in blocks]

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.guesses.pop(sequence_id, None)
        self.running.difference_update(sequence_ids)
        self.owed.difference_update(sequence_ids)
        self.live.difference_update(sequence_ids)
        self.found = [b for b in self.found if b.work.span.sequence_id not in sequence_ids]
        self.decoder.release(sequence_ids)

    def _guess_on(self, timeout_s: float) -> None:
        """One round for each guess that is not long enough."""
        resumed = [b for b in self._unfinished() if b.work.span.sequence_id not in self.running]
        if resumed:
            self.running |= {b.work.span.sequence_id for b in resumed}
            self.decoder.resume(resumed)
        for block in self.decoder.collect_blocks(timeout_s):
            sequence_id = block.work.span.sequence_id
            self.running.discard(sequence_id)
            if block.missing_from is not None or not block.long_enough:  # this tier or one below lacks something
                del self.guesses[sequence_id]

    def _pause(self) -> None:
        """Take the guesses back: what comes now is waited for."""
        self.decoder.withdraw(self.running)
        self.running.clear()

    def _head(self, work: Work) -> Block:
        """The work with what was guessed beyond it, if it agrees with the guess."""
        guess = self.guesses.pop(work.span.sequence_id, None)
        if guess is None or not work.sample or not work.lookaheads[0]:
            return Block(work)
        text, span = guess.span, work.span
        first = max(text.start, span.start)
        overlap = text.tokens[first - text.start : span.end - text.start]
        if span.end >= text.end or span.tokens[first - span.start :] != overlap:
            return Block(work)
        num_found = text.end - span.end
        if num_found > len(guess.tokens):  # the statement ends before what was handed up: that was not accepted whole
            return Block(work)
        return replace(
            guess,
            work=work,
            tokens=guess.tokens[-num_found:],
            origins=guess.origins[-num_found:],
            ahead=False,
        )


def guess_after(block: Block) -> Block | None:
    """What to go on with once `block` is handed up; None where it cannot be whole."""
    work, text = block.work, block.span
    if block.ended or block.missing_from is not None or not block.tokens or not work.lookaheads[0]:
        return None
    settled = Span(text.sequence_id, work.span.end, block.tokens)
    lookahead = work.lookaheads[0] + 1  # one more, for the token that the level above adds
    return Block(Work(settled, (lookahead, *work.lookaheads[1:])), told=block.told, ahead=True)
