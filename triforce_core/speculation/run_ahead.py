"""Run-ahead: a tier drafts on while the level above verifies. It does so only while it has fewer requests than
`micro_batches`.
"""

from dataclasses import replace

from triforce_core.messages import Proposal, Work
from triforce_core.speculation.decoder import Block, SpeculativeDecoder, State


class RunAhead:
    """A decoder that continues after it has handed up a block, as if the level above accepted the whole block. The
    first token of such a guess stands for the one that the level above adds. If the next work's span agrees with the
    guess, the tokens after the span begin that work's block; otherwise it is dropped. Guesses advance by one round per
    call, only while no work waits and fewer than `fewer_than` sequences are known: more keep every tier busy.
    """

    def __init__(self, decoder: SpeculativeDecoder, fewer_than: int) -> None:
        self.decoder, self.fewer_than = decoder, fewer_than

    @property
    def owed(self) -> list[Block]:
        """The blocks that the level above waits for."""
        return self.decoder.owed

    @property
    def can_run_ahead(self) -> bool:
        """Whether `collect` can advance a guess while no answer is owed."""
        return not self.owed and bool(self._guesses())

    def _guesses(self) -> list[Block]:
        """The guesses that can be advanced; none if this tier knows too many sequences."""
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
        """The block for this work with the tokens guessed beyond it; None if there are none or the work disagrees."""
        guess, span = self.decoder.blocks.get(work.span.sequence_id), work.span
        if guess is None or guess.owed or not work.sample or not work.lookaheads[0]:
            return None
        lacking = guess.missing_from is not None or not guess.long_enough
        if guess.state is State.DONE and lacking:  # this tier or one below lacked something
            return None
        given, num_guessed = guess.work.span, guess.end - span.end
        # If the span ends before the end of the handed-up block, the level above has not accepted the whole block.
        if not 0 < num_guessed <= len(guess.tokens):
            return None
        guessed_text, first = given.tokens + guess.tokens, max(given.start, span.start)
        if span.tokens[first - span.start :] != guessed_text[first - given.start : span.end - given.start]:
            return None
        block = replace(
            guess, work=work, owed=True, tokens=guess.tokens[-num_guessed:], origins=guess.origins[-num_guessed:]
        )
        if block.long_enough:
            block.state, block.proposal = State.DONE, None
        elif block.state is State.DONE:  # the guess was shorter than the block that is now asked for
            block.state = State.TO_ASK
        return block
