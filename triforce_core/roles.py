"""What a model does in a tier: propose tokens of its own (the leaf), or judge those of the level below."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from triforce_core.kv.base import Forward, Lack, Row
from triforce_core.messages import Claim, Proposal, SequenceSpec, Span, Tally, Tier, Verdict, Work, wait_in_turn
from triforce_core.models.runner import ModelRunner
from triforce_core.sampling.draw import Draw, draw_tokens
from triforce_core.timeline import TIMELINE


class ModelProposer:
    """The leaf of the chain: drafts one token after another, for all waiting sequences at once."""

    tier = Tier.DRAFT

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.waiting: dict[int, Work] = {}

    def submit(self, work: list[Work]) -> None:
        wait_in_turn(self.waiting, work)

    def collect(self, timeout_s: float) -> list[Proposal]:
        """Draft for everything that waits; never blocks on anything but the model."""
        work, self.waiting = list(self.waiting.values()), {}
        drafted: list[tuple[int, ...]] = [()] * len(work)
        lacks: dict[int, Lack] = {}
        active = [i for i, w in enumerate(work) if w.lookaheads[0]]
        while active:
            forwards = [Forward(statement(work[i].span, drafted[i]), num_sampled=1) for i in active]
            with TIMELINE.stage(self.tier, len(forwards), len(forwards)):
                logits, batch = self.runner.forward(forwards)
                tokens = dict(draw_rows(self.runner, logits, batch.rows))
            lacks.update(batch.lacking)
            unfinished = []
            for i in active:
                span = work[i].span
                if span.sequence_id not in tokens:
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
        return [self._answer(w, tokens, lacks.get(w.span.sequence_id)) for w, tokens in zip(work, drafted, strict=True)]

    def _answer(self, work: Work, tokens: tuple[int, ...], lack: Lack | None) -> Proposal:
        return Proposal(
            sequence_id=work.span.sequence_id,
            start=work.span.end,
            tokens=tokens,
            origins=bytes([self.tier]) * len(tokens),
            missing_from=lack.missing_from if lack else None,
            tallies=(Tally(),),
        )

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.waiting.pop(sequence_id, None)
        self.runner.release(sequence_ids)


class NoProposer:
    """The leaf where there is no drafter: every answer is empty."""

    def __init__(self) -> None:
        self.waiting: list[Work] = []

    def submit(self, work: list[Work]) -> None:
        self.waiting += work

    def collect(self, timeout_s: float) -> list[Proposal]:
        work, self.waiting = self.waiting, []
        return [Proposal(w.span.sequence_id, w.span.end) for w in work]

    def release(self, sequence_ids: list[int]) -> None:
        self.waiting = [w for w in self.waiting if w.span.sequence_id not in sequence_ids]


class ModelVerifier:
    """Judges by shared noise: a token is accepted if and only if it is the one that this tier draws itself."""

    def __init__(self, runner: ModelRunner, tier: Tier) -> None:
        self.runner, self.tier = runner, tier

    def verify(self, claims: list[Claim]) -> list[Verdict]:
        claims = [self._sound(claim) for claim in claims]
        forwards = [Forward(c.span.extended(c.proposed), len(c.proposed) + 1 if c.sample else 0) for c in claims]
        with TIMELINE.stage(self.tier, len(claims), sum(len(c.proposed) + 1 for c in claims if c.sample)):
            logits, batch = self.runner.forward(forwards)
            own = dict(draw_rows(self.runner, logits, batch.rows))
        verdicts = []
        for claim in claims:
            sequence_id = claim.span.sequence_id
            if lack := batch.lacking.get(sequence_id):
                verdicts.append(Verdict(missing_from=lack.missing_from, snapshot_wanted=lack.snapshot_wanted))
            elif not claim.sample:
                verdicts.append(Verdict())
            else:
                verdicts.append(judge(own[sequence_id], claim, self.runner.kv.held[sequence_id].spec))
        return verdicts

    def release(self, sequence_ids: list[int]) -> None:
        self.runner.release(sequence_ids)

    def _sound(self, claim: Claim) -> Claim:
        """The claim without proposed tokens that cannot be: outside the vocabulary, or beyond the request's length."""
        held = self.runner.kv.held.get(claim.span.sequence_id)
        spec = held.spec if held is not None else claim.span.spec
        room = max(0, spec.max_length - claim.span.end) if spec is not None else 0
        vocab_size = self.runner.model.config.vocab_size
        known = takewhile(lambda token: 0 <= token < vocab_size, claim.proposed[:room])
        return replace(claim, proposed=tuple(known))


def judge(own: list[int], claim: Claim, spec: SequenceSpec) -> Verdict:
    """Keep the verifier's own tokens up to the first that was not proposed, a stop token, or the length limit."""
    kept: list[int] = []
    for position, token in enumerate(own):
        kept.append(token)
        ended = token in spec.stop_token_ids or claim.span.end + len(kept) >= spec.max_length
        if ended or position >= len(claim.proposed) or claim.proposed[position] != token:
            break
    agreed = len(kept) - 1 + (claim.proposed[len(kept) - 1 : len(kept)] == (kept[-1],))
    return Verdict(tuple(kept), agreed, ended)


def statement(span: Span, drafted: tuple[int, ...]) -> Span:
    """The span itself at first; then only what was drafted after it, for the span may be a whole prompt."""
    return Span(span.sequence_id, span.end, drafted) if drafted and span.end else span.extended(drafted)


def ends(tokens: tuple[int, ...], spec: SequenceSpec) -> bool:
    return bool(tokens) and tokens[-1] in spec.stop_token_ids


def draw_rows(runner: ModelRunner, logits: Tensor, rows: list[Row]) -> Iterator[tuple[int, list[int]]]:
    """The runner's own token at each sampled position, by sequence id."""
    sampled = [row for row in rows if row.num_sampled]
    draws = []
    for row in sampled:
        spec, end = runner.kv.held[row.sequence_id].spec, len(runner.kv.held[row.sequence_id].tokens)
        first = end - row.num_sampled + 1
        draws += [Draw(spec.sampling, spec.seed, position) for position in range(first, end + 1)]
    with torch.inference_mode():
        tokens = draw_tokens(logits, draws)
    taken = 0
    for row in sampled:
        yield row.sequence_id, tokens[taken : taken + row.num_sampled]
        taken += row.num_sampled
