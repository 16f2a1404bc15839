"""Prompt lookup: finds the tokens that followed the most recent earlier occurrence of the sequence's last tokens.

It needs no model (Saxena 2023, "Prompt Lookup Decoding"). Acceptance is high in texts that repeat themselves, such as
edits of a given source or answers that quote a document; other texts get few drafts, at no cost. The lowest tier
(leaf.py) drafts with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from triforce_core.messages import SCORED, SequenceSpec, Tally

LONGEST = 3  # three repeated tokens predict well what follows; longer runs are seldom repeated
SHORTEST = 2  # a single token is repeated too often to predict what follows
# A `Shadow` reads only the last `SHADOWED` tokens of a prompt, and at most `AT_ONCE` tokens in one call. Each token
# takes 1.5 µs and 200 bytes.
SHADOWED, AT_ONCE = 16_384, 1024
MUCH = 16  # if a `Shadow` has more tokens than this to read, the time for it does not count as part of a round


class Occurrences:
    """Where each run of `n` tokens of a growing text last ended. The cost of an update depends on the change alone.

    A run is known by its hash, which takes half the memory of the run itself. Two runs of one text hardly ever have the
    same 64-bit hash, and if they did, only a draft would be wrong.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.latest: dict[int, int] = {}  # by hash of a run: the position after its latest occurrence
        self.earlier = array("i", [0] * n)  # by end position: the end of the run's previous occurrence; 0: none

    def grow(self, tokens: list[int]) -> None:
        """Add the runs that end in the new part of `tokens`."""
        for end in range(len(self.earlier), len(tokens) + 1):
            run = hash(tuple(tokens[end - self.n : end]))
            self.earlier.append(self.latest.get(run, 0))
            self.latest[run] = end

    def shrink(self, tokens: list[int], length: int) -> None:
        """Forget the runs that end beyond `length`; `tokens` is the text before it is cut."""
        for end in range(len(self.earlier) - 1, max(length, self.n - 1), -1):
            before, run = self.earlier.pop(), hash(tuple(tokens[end - self.n : end]))
            if before:
                self.latest[run] = before
            else:
                del self.latest[run]

    def before_last(self) -> int:
        """The position after the previous occurrence of the text's last run. 0: there is none, or the text is shorter
        than a run.
        """
        return self.earlier[-1]


class Text:
    """The stated tokens of one sequence, with the positions of its runs."""

    def __init__(self, spec: SequenceSpec, longest: int) -> None:
        self.spec = spec
        self.tokens: list[int] = []
        self.occurrences = [Occurrences(n) for n in range(longest, SHORTEST - 1, -1)]

    def state(self, start: int, tokens: tuple[int, ...]) -> int:
        """The align rule: keep the text that agrees, replace the rest. `start` must not be beyond the text's end.

        Returns the position below which the text stays as it was.
        """
        common = start + agreeing(self.tokens[start : start + len(tokens)], tokens)
        for occurrences in self.occurrences:
            occurrences.shrink(self.tokens, common)
        self.tokens[common:] = tokens[common - start :]
        for occurrences in self.occurrences:
            occurrences.grow(self.tokens)
        return common

    def continued(self, count: int) -> tuple[int, ...]:
        """At most `count` tokens that followed the longest repeated run at its earlier occurrence, up to a stop token.

        If the text ends before `count` tokens, the draft goes on with its own tokens from the start, so that it repeats
        itself, as in LZ77.
        """
        place = next((place for o in self.occurrences if (place := o.before_last())), 0)
        if not place:
            return ()
        drafted: list[int] = []
        period = len(self.tokens) - place
        while len(drafted) < count and not (drafted and drafted[-1] in self.spec.stop_token_ids):
            drafted.append(self.tokens[place + len(drafted)] if len(drafted) < period else drafted[-period])
        return tuple(drafted)


class Trial:
    """Scores prompt lookup on a text that grows, whether or not lookup drafts it.

    Lookup guesses the `SCORED` tokens after the end of the text. When the text has grown by `SCORED` tokens, the guess
    is compared with them, and the next guess is made from the text's new end. Every guess stays until then, even one
    that found nothing or is already wrong. Otherwise such guesses would be counted too often.

    A guess is compared with the text that is stated at that moment. The last tokens of this text may be the retrieval
    tier's own, and the target may still replace them. The score is fair all the same: real drafts are accepted or
    rejected by comparison with the same text.
    """

    def __init__(self) -> None:
        self.start = 0  # position of the guess's first token
        self.guess: tuple[int, ...] | None = None  # empty: lookup found nothing; None: no guess was made yet

    def score(self, text: Text, unchanged: int) -> Tally:
        """Counts the guess if `text` now covers it. Call this after each `Text.state`. `unchanged`: what `Text.state`
        returned.
        """
        tally = Tally()
        # If the text before the guess was replaced, nothing can be said of the guess, and another takes its place.
        if self.guess is not None and unchanged >= self.start:
            if len(text.tokens) < self.start + SCORED:
                return tally
            right = agreeing(self.guess, text.tokens[self.start : self.start + SCORED])
            tally = Tally(rounds=1, proposed=len(self.guess), accepted=right, rejected=int(right < len(self.guess)))
        self.start, self.guess = len(text.tokens), text.continued(SCORED)
        return tally


class Shadow:
    """Scores prompt lookup on a text that the lowest tier is not told, because that tier drafts nothing. A shadow knows
    the end of the prompt (`SHADOWED` tokens) and all tokens decoded since.
    """

    def __init__(self, spec: SequenceSpec, tokens: int) -> None:
        """`tokens`: the length of the text so far."""
        self.text, self.trial = Text(spec, LONGEST), Trial()
        self.first = max(0, tokens - SHADOWED)  # position of the first token that it knows

    def behind(self, tokens: list[int]) -> int:
        """How many tokens it has still to read."""
        return len(tokens) - self.first - len(self.text.tokens)

    def due(self, tokens: list[int]) -> bool:
        """Whether `score` has anything to do: a guess to make or to count, or a part of a long prompt to read."""
        return self.trial.guess is None or self.behind(tokens) >= SCORED

    def score(self, tokens: list[int]) -> Tally:
        """Counts the guess if `tokens`, the same text as before and more, now covers it. Each call reads at most
        `AT_ONCE` tokens, because the engine's thread must not stand still until a long prompt is read.
        """
        complete, held = self.behind(tokens) <= AT_ONCE, len(self.text.tokens)
        more = tokens[self.first + held : self.first + held + AT_ONCE]
        unchanged = self.text.state(held, tuple(more))
        return self.trial.score(self.text, unchanged) if complete else Tally()


def agreeing(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
