"""Prompt lookup: drafts the tokens that followed the most recent earlier occurrence of the sequence's last tokens.

This leaf of the chain needs no model (Saxena 2023, "Prompt Lookup Decoding"). Acceptance is high in texts that repeat
themselves, such as edits of a given source or answers that quote a document; other texts get few drafts, at no cost.
"""

from __future__ import annotations

from array import array

from triforce_core.messages import Proposal, SequenceSpec, Tally, Tier, Work, wait_in_turn

LONGEST = 3  # three repeated tokens predict well what follows; longer runs are seldom repeated
SHORTEST = 2  # a single token is repeated too often to predict what follows


class Occurrences:
    """Where each run of `n` tokens of a growing text last ended. The cost of an update depends on the change alone.

    A run is known by its hash, which takes half the memory of the run itself. Two runs of one text hardly ever have the
    same 64-bit hash, and if they did, only a draft would be wrong.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.latest: dict[int, int] = {}  # by hash of a run: the position after its latest occurrence
        self.earlier = array("i", [0] * n)  # by end position: where the same run ended before; 0: nowhere

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
        """Where the text's last run ended before; 0: this run is new, or the text is shorter than a run."""
        return self.earlier[-1]


class Text:
    """The stated tokens of one sequence, with the positions of its runs."""

    def __init__(self, spec: SequenceSpec, longest: int) -> None:
        self.spec = spec
        self.tokens: list[int] = []
        self.occurrences = [Occurrences(n) for n in range(longest, SHORTEST - 1, -1)]

    def state(self, start: int, tokens: tuple[int, ...]) -> None:
        """The align rule: keep the text that agrees, replace the rest. `start` must not be beyond the text's end."""
        held = self.tokens[start : start + len(tokens)]
        common = start + next((i for i, (a, b) in enumerate(zip(held, tokens, strict=False)) if a != b), len(held))
        for occurrences in self.occurrences:
            occurrences.shrink(self.tokens, common)
        self.tokens[common:] = tokens[common - start :]
        for occurrences in self.occurrences:
            occurrences.grow(self.tokens)

    def continued(self, count: int) -> tuple[int, ...]:
        """At most `count` tokens that followed the longest repeated run at its earlier occurrence, up to a stop token.

        If these tokens reach the end of the text, they continue with the drafted tokens, as in LZ77.
        """
        place = next((place for o in self.occurrences if (place := o.before_last())), 0)
        if not place:
            return ()
        drafted: list[int] = []
        period = len(self.tokens) - place
        while len(drafted) < count and not (drafted and drafted[-1] in self.spec.stop_token_ids):
            drafted.append(self.tokens[place + len(drafted)] if len(drafted) < period else drafted[-period])
        return tuple(drafted)


class NgramProposer:
    """The leaf of the chain in place of a drafting model. Looks up runs of `longest` tokens, then shorter ones."""

    tier = Tier.DRAFT
    runner = None  # no model

    def __init__(self, longest: int = LONGEST) -> None:
        assert longest >= SHORTEST
        self.longest = longest
        self.held: dict[int, Text] = {}
        self.waiting: dict[int, Work] = {}

    def submit(self, work: list[Work]) -> None:
        wait_in_turn(self.waiting, work)

    def collect(self, timeout_s: float) -> list[Proposal]:
        """Answer all waiting work; never block."""
        work, self.waiting = list(self.waiting.values()), {}
        return [self._answer(w) for w in work]

    def _answer(self, work: Work) -> Proposal:
        span = work.span
        text = self.held.get(span.sequence_id)
        if text is None and span.start == 0:
            assert span.spec is not None, "a span from 0 carries the spec"
            text = self.held[span.sequence_id] = Text(span.spec, self.longest)
        if text is None or span.start > len(text.tokens):
            missing_from = 0 if text is None else len(text.tokens)
            return Proposal(span.sequence_id, span.end, missing_from=missing_from, tallies=(Tally(),))
        text.state(span.start, span.tokens)
        room = text.spec.max_length - 1 - span.end  # the target draws the last token itself
        tokens = text.continued(min(work.lookaheads[0], room))
        return Proposal(span.sequence_id, span.end, tokens, bytes([self.tier]) * len(tokens), tallies=(Tally(),))

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.waiting.pop(sequence_id, None)
            self.held.pop(sequence_id, None)
