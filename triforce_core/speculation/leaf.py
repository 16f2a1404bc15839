"""The lowest tier of the chain: prompt lookup or a model drafts, as each work asks.

The leaf keeps the stated text of every sequence. So prompt lookup can draft at any time, and the model is told what it
has missed when it is needed again, without asking the tier above.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from triforce_core.messages import Drafting, Origin, Proposal, Proposer, Span, Tally, Tier, Work, wait_in_turn
from triforce_core.speculation.lookup import Text, Trial

if TYPE_CHECKING:
    from triforce_core.models.runner import ModelRunner


class DraftingModel(Proposer, Protocol):
    """The model half of a leaf. One call of its `collect` answers all work that was submitted."""

    @property
    def runner(self) -> ModelRunner: ...


@dataclass(slots=True)
class Known:
    """What the leaf knows of one sequence."""

    text: Text
    trial: Trial = field(default_factory=Trial)
    model_holds: int = 0  # the model has been told the text up to here, and it has not changed since

    def untold(self, sequence_id: int) -> Span:
        """The text that the model has not been told."""
        start = self.model_holds
        return Span(sequence_id, start, self.text.tokens(start, len(self.text)), None if start else self.text.spec)


class Leaf:
    """Drafts by prompt lookup, by its model, or by lookup and, where that finds nothing, by the model. Without a model
    it always drafts by lookup.

    The leaf's tally has the model's passes, and the score of prompt lookup, which is counted even while the model
    drafts (see `Trial`).
    """

    tier = Tier.DRAFT

    def __init__(self, model: DraftingModel | None = None) -> None:
        self.model = model
        self.held: dict[int, Known] = {}
        self.waiting: dict[int, Work] = {}

    @property
    def runner(self) -> ModelRunner | None:
        return None if self.model is None else self.model.runner

    def submit(self, work: list[Work]) -> None:
        wait_in_turn(self.waiting, work)

    def collect(self, timeout_s: float) -> list[Proposal]:
        """Answer all waiting work, for as long as the model needs; `timeout_s` is not used."""
        work, self.waiting = list(self.waiting.values()), {}
        answers = {w.span.sequence_id: self._looked_up(w) for w in work}
        for drafted in self._drafted([w for w in work if self._needs_model(w, answers[w.span.sequence_id])]):
            score, passes = answers[drafted.sequence_id].tallies[0], drafted.tallies[0]
            answers[drafted.sequence_id] = replace(drafted, tallies=(score + passes,))
        return list(answers.values())

    def _looked_up(self, work: Work) -> Proposal:
        """Take in what the work states, and answer it as far as that goes without the model."""
        span = work.span
        known = self.held.get(span.sequence_id)
        if known is None and span.start == 0:
            assert span.spec is not None, "a span from 0 carries the spec"
            known = self.held[span.sequence_id] = Known(Text(span.spec))
        if known is None or span.start > len(known.text):
            missing_from = 0 if known is None else len(known.text)
            return Proposal(span.sequence_id, span.end, missing_from=missing_from, tallies=(Tally(),))
        unchanged = known.text.state(span.start, span.tokens)
        known.model_holds = min(known.model_holds, unchanged)
        score = known.trial.score(known.text, unchanged)
        looks_up = self.model is None or work.drafting is not Drafting.MODEL
        tokens = known.text.continued(self._count(work)) if looks_up else ()
        return Proposal(span.sequence_id, span.end, tokens, bytes([Origin.LOOKUP]) * len(tokens), tallies=(score,))

    def _count(self, work: Work) -> int:
        """The most tokens to draft: one less than the text has room for, because the verifying pass adds one."""
        room = self.held[work.span.sequence_id].text.spec.max_length - 1 - work.span.end
        return max(0, min(work.lookaheads[0], room))

    def _needs_model(self, work: Work, answer: Proposal) -> bool:
        answered = bool(answer.tokens) or answer.missing_from is not None
        by_lookup_alone = self.model is None or work.drafting is Drafting.LOOKUP
        return not answered and not by_lookup_alone and self._count(work) > 0

    def _drafted(self, work: list[Work]) -> list[Proposal]:
        """The model's drafts for this work. Where its cache lacks text, it is told that text and asked once more."""
        drafts = {draft.sequence_id: draft for draft in self._ask_model(work)}
        again = [w for w in work if drafts[w.span.sequence_id].missing_from is not None]
        drafts.update({draft.sequence_id: draft for draft in self._ask_model(again)})
        # This tier has the whole text: the tier above need not state it again, whatever the model lacks.
        return [replace(draft, missing_from=None) for draft in drafts.values()]

    def _ask_model(self, work: list[Work]) -> list[Proposal]:
        if self.model is None or not work:
            return []
        told = [(w, self.held[w.span.sequence_id].untold(w.span.sequence_id)) for w in work]
        self.model.submit([replace(w, span=span, lookaheads=(self._count(w),)) for w, span in told])
        drafts = self.model.collect(0.0)
        for draft in drafts:
            lacks = draft.missing_from
            self.held[draft.sequence_id].model_holds = draft.start if lacks is None else lacks
        return drafts

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.waiting.pop(sequence_id, None)
            self.held.pop(sequence_id, None)
        if self.model is not None:
            self.model.release(sequence_ids)
