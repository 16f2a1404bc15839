"""Run-ahead: drafting on while the level above verifies, when fewer requests are live than there are micro-batches."""

from __future__ import annotations

from dataclasses import replace

from triforce_core.decoder import Block, SpeculativeDecoder, State
from triforce_core.messages import Proposal, Work


class RunAhead:
    """A decoder that, once its block is handed up, goes on as if the level above accepted all of it.

    The token that the level above adds to an accepted block is guessed too: it is the first that this level finds next.
    Work that agrees with the guess starts from what was found beyond it; any other finds it dropped. Guesses advance by
    one round a call and only while no work waits, so work waits for at most one round of them; and only while fewer
    than `fewer_than` sequences are live, for more keep every tier busy by themselves.
    """

    def __init__(self, decoder: SpeculativeDecoder, fewer_than: int) -> None:
        self.decoder, self.fewer_than = decoder, fewer_than

    @property
    def owed(self) -> list[Block]:
        """The blocks that the level above waits for."""
        return self.decoder.owed

    @property
    def can_run_ahead(self) -> bool:
        """Whether `collect` has something to do though it owes no answer."""
        return not self.owed and bool(self._guesses())

    def _guesses(self) -> list[Block]:
        """Those to go on with when nobody waits."""
        blocks = self.decoder.blocks.values()
        return [block for block in blocks if block.state is not State.DONE] if len(blocks) < self.fewer_than else []

    def submit(self, work: list[Work]) -> None:
        self.decoder.resume([self._begun(w) or Block(w) for w in work])

    def collect(self, timeout_s: float) -> list[Proposal]:
        if self.owed:
            return self.decoder.collect(timeout_s)
        self.decoder.advance(self._guesses(), timeout_s)
        return []

    def release(self, sequence_ids: list[int]) -> None:
        self.decoder.release(sequence_ids)

    def _begun(self, work: Work) -> Block | None:
        """The block for this work with the tokens that were guessed beyond it, if there are any and it agrees."""
        guess, span = self.decoder.blocks.get(work.span.sequence_id), work.span
        if guess is None or guess.owed or not work.sample or not work.lookaheads[0]:
            return None
        lacking = guess.missing_from is not None or not guess.long_enough
        if guess.state is State.DONE and lacking:  # this tier or one below lacked something
            return None
        given, num_guessed = guess.work.span, guess.end - span.end
        # A statement that ends before the block that was handed up does not accept the whole of it.
        if not 0 < num_guessed <= len(guess.tokens):
            return None
        settled, first = given.tokens + guess.tokens, max(given.start, span.start)
        if span.tokens[first - span.start :] != settled[first - given.start : span.end - given.start]:
            return None
        block = replace(
            guess, work=work, owed=True, tokens=guess.tokens[-num_guessed:], origins=guess.origins[-num_guessed:]
        )
        if block.long_enough:
            block.state, block.proposal = State.DONE, None
        elif block.state is State.DONE:  # the guess was shorter than what is asked now
            block.state = State.TO_ASK
        return block
