"""Drafting by a model: the half of the lowest tier (leaf.py) that needs one. Prompt lookup is in lookup.py."""

from time import perf_counter

from triforce_core.kv.base import Batch, Forward, Lack
from triforce_core.messages import Origin, Proposal, SequenceSpec, Span, Tally, Tier, Work, wait_in_turn
from triforce_core.models.drawing import NO_TOKEN, Drawer, by_sequence
from triforce_core.models.runner import ModelRunner
from triforce_core.sampling.grammars import Grammars


class ModelProposer:
    """A model drafts one token after another, for all waiting sequences in one batch."""

    tier = Tier.DRAFT

    def __init__(self, runner: ModelRunner, grammars: Grammars | None = None) -> None:
        self.runner, self.drawer = runner, Drawer(runner, grammars, wait_for_grammars=False)
        self.waiting: dict[int, Work] = {}

    def submit(self, work: list[Work]) -> None:
        wait_in_turn(self.waiting, work)

    def collect(self, timeout_s: float) -> list[Proposal]:
        """Draft for all waiting work. Takes as long as the model needs; `timeout_s` is not used."""
        work, self.waiting = list(self.waiting.values()), {}
        drafted: list[tuple[int, ...]] = [()] * len(work)
        tallies = [Tally()] * len(work)
        lacks: dict[int, Lack] = {}
        active = [i for i, w in enumerate(work) if w.lookaheads[0]]
        while active:
            forwards = [Forward(statement(work[i].span, drafted[i]), 1, len(drafted[i])) for i in active]
            began = perf_counter()
            tokens, batch = self.step(forwards)
            this_pass = Tally(passes=1, busy_s=perf_counter() - began)
            lacks.update(batch.lacking)
            unfinished = []
            for i in active:
                span = work[i].span
                if span.sequence_id in tokens:
                    tallies[i] += this_pass
                if tokens.get(span.sequence_id, [NO_TOKEN]) == [NO_TOKEN]:
                    continue
                drafted[i] += tuple(tokens[span.sequence_id])
                spec = self.runner.kv.held[span.sequence_id].spec
                length = span.end + len(drafted[i])
                if (
                    len(drafted[i]) < work[i].lookaheads[0]
                    and length < spec.max_length - 1
                    and not ends(drafted[i], spec)
                ):
                    unfinished.append(i)
            active = unfinished
        return [
            self._answer(w, tokens, lacks.get(w.span.sequence_id), tally)
            for w, tokens, tally in zip(work, drafted, tallies, strict=True)
        ]

    def step(self, forwards: list[Forward]) -> tuple[dict[int, list[int]], Batch]:
        """One pass, and the tokens drawn from it by sequence id."""
        logits, batch = self.runner.forward(forwards)
        return self.drawer.draw(by_sequence(logits, batch.rows)), batch

    def _answer(self, work: Work, tokens: tuple[int, ...], lack: Lack | None, tally: Tally) -> Proposal:
        return Proposal(
            sequence_id=work.span.sequence_id,
            start=work.span.end,
            tokens=tokens,
            origins=bytes([Origin.DRAFT]) * len(tokens),
            missing_from=lack.missing_from if lack else None,
            tallies=(tally,),
        )

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.waiting.pop(sequence_id, None)
        self.runner.release(sequence_ids)
        self.drawer.release(sequence_ids)


def statement(span: Span, drafted: tuple[int, ...]) -> Span:
    """The span itself at first; later only the tokens drafted after it, because the span may be a whole prompt."""
    return Span(span.sequence_id, span.end, drafted) if drafted and span.end else span.extended(drafted)


def ends(tokens: tuple[int, ...], spec: SequenceSpec) -> bool:
    return bool(tokens) and tokens[-1] in spec.stop_token_ids
