"""Prompt lookup: finds the tokens that followed the most recent earlier occurrence of the sequence's last tokens.

It needs no model (Saxena 2023, "Prompt Lookup Decoding"). Acceptance is high in texts that repeat themselves, such as
edits of a given source or answers that quote a document; other texts get few drafts, at no cost. The lowest tier
(leaf.py) drafts with it.
"""

from array import array
from collections.abc import Sequence
from typing import Final

from triforce_core.messages import SCORED, SequenceSpec, Tally, agreement

MOST_REST = 64  # tokens
TYPE: Final = "I"  # of tokens in arrays and memory views: unsigned integers
WIDTH = array(TYPE).itemsize  # bytes of a token


class Text:
    """The stated tokens of one sequence.

    They are kept as bytes, in which Python finds the last occurrence of others: in about 10 µs at 2,000 tokens, 25 µs
    at 16,000, and 150 µs at 128,000. An index would answer sooner. But building one took 0.5 to 1.5 µs for each token
    of the prompt, which outputs are seldom long enough to earn back.
    """

    def __init__(self, spec: SequenceSpec) -> None:
        self.spec = spec
        self.held = bytearray()

    def __len__(self) -> int:
        return len(self.held) // WIDTH

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """The tokens from position `start` up to `end`, exclusive, or to the end of the text."""
        return tuple(memoryview(self.held)[WIDTH * start : WIDTH * end].cast(TYPE))

    def state(self, start: int, tokens: Sequence[int]) -> int:
        """Replace what disagrees from `start` on, which is within the text; returns where it may have changed."""
        most = min(len(tokens), len(self) - start)
        common = start + agreement(self.tokens(start, start + most), 0, tuple(tokens), 0, most)
        self.held[WIDTH * common :] = array(TYPE, tokens[common - start :]).tobytes()
        return common

    def continued(self, count: int) -> tuple[int, ...]:
        """At most `count` tokens that followed the text's last tokens at their latest earlier occurrence, up to a stop
        token.

        If the text ends before `count` tokens, the draft goes on with its own tokens from the start, so that it repeats
        itself, as in LZ77.
        """
        place = self._seen_before()
        if not place:
            return ()
        drafted = (self.tokens(place, place + count) * count)[:count]
        ends = (n for n, token in enumerate(drafted, 1) if token in self.spec.stop_token_ids)
        return drafted[: next(ends, count)]

    def _seen_before(self) -> int:
        """The position after the latest earlier occurrence of the text's last three tokens, or else of its last two.
        0: there is none. Three repeated tokens predict well what follows, and longer runs are seldom repeated. A single
        token is repeated too often to predict what follows.
        """
        if len(self) < 3:
            return 0
        of_two = self._latest(2, len(self) - 1)
        # Three tokens end with two, so they were not seen later than these two.
        return of_two and (self._latest(3, of_two) or of_two)

    def _latest(self, run: int, end: int) -> int:
        """The position after the latest occurrence of the last `run` tokens that ends by `end`; 0: there is none."""
        wanted = self.held[-WIDTH * run :]
        found = self.held.rfind(wanted, 0, WIDTH * end)
        while found > 0 and found % WIDTH:  # these bytes begin within a token
            found = self.held.rfind(wanted, 0, found + WIDTH * run - 1)
        return 0 if found < 0 else found // WIDTH + run


class Trial:
    """Scores prompt lookup on a text that grows, whether or not lookup drafts it. A guess of the next `SCORED` tokens
    is compared once the text has them, and the next guess is made from its new end: even one that is already wrong
    stays until then, or such guesses would be counted too often. The text's last tokens may still be replaced by the
    target, as for real drafts.
    """

    def __init__(self) -> None:
        self.start = 0  # position of the guess's first token
        self.guess: tuple[int, ...] | None = None  # empty: lookup found nothing; None: no guess was made yet

    def score(self, text: Text, unchanged: int) -> Tally:
        """Counts the guess if `text` now covers it; to be called with what `Text.state` returned, after each."""
        tally = Tally()
        # If the text before the guess was replaced, nothing can be said of the guess, and another takes its place.
        if self.guess is not None and unchanged >= self.start:
            if len(text) < self.start + SCORED:
                return tally
            most = min(len(self.guess), len(text) - self.start)
            right = agreement(self.guess, 0, text.tokens(self.start, self.start + most), 0, most)
            tally = Tally(rounds=1, proposed=len(self.guess), accepted=right, rejected=int(right < len(self.guess)))
        self.start, self.guess = len(text), text.continued(SCORED)
        return tally


class Shadow:
    """Scores prompt lookup on a text that the lowest tier is not told, because that tier drafts nothing. While guesses
    are wrong, it rests for longer and longer between them.
    """

    def __init__(self, spec: SequenceSpec) -> None:
        self.text, self.trial = Text(spec), Trial()
        self.rest = 0  # tokens between the end of a guess and the next
        self.awake_at = 0  # the length of the text at which it guesses again

    def due(self, length: int) -> bool:
        """Whether `score` has anything to do for a text of this length: a guess to make or to count."""
        return length >= (self.awake_at if self.trial.guess is None else self.trial.start + SCORED)

    def forget(self) -> None:
        """While the lowest tier drafts, drop the guess and the rest: both go by what the text was like before."""
        self.trial.guess, self.rest, self.awake_at = None, 0, 0

    def score(self, tokens: list[int]) -> Tally:
        """Counts the guess if `tokens`, the same text as before and more, now covers it."""
        held = len(self.text)
        tally = self.trial.score(self.text, self.text.state(held, tokens[held:]))
        if tally.rounds:
            self.rest = 0 if tally.accepted else min(MOST_REST, 2 * self.rest + SCORED)
        if self.rest and tally.rounds:
            self.awake_at, self.trial.guess = len(self.text) + self.rest, None
        return tally
