"""Verification: a tier's model accepts or rejects the tokens proposed by the level below."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace
from itertools import takewhile

from triforce_core.kv.base import Forward
from triforce_core.messages import Claim, SequenceSpec, Tier, Verdict
from triforce_core.models.drawing import draw_rows
from triforce_core.models.runner import ModelRunner
from triforce_core.timeline import TIMELINE


class ModelVerifier:
    """Verifies with shared noise: a proposed token is accepted if and only if this tier draws the same token itself."""

    def __init__(self, runner: ModelRunner, tier: Tier) -> None:
        self.runner, self.tier = runner, tier

    @property
    def held(self) -> Sized:
        """The sequences that its cache holds."""
        return self.runner.kv.held

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
        """The claim, its proposed tokens cut at `max_length` and before the first that is outside the vocabulary."""
        held = self.runner.kv.held.get(claim.span.sequence_id)
        spec = held.spec if held is not None else claim.span.spec
        room = max(0, spec.max_length - claim.span.end) if spec is not None else 0
        vocab_size = self.runner.model.config.vocab_size
        known = takewhile(lambda token: 0 <= token < vocab_size, claim.proposed[:room])
        return replace(claim, proposed=tuple(known))


def judge(own: list[int], claim: Claim, spec: SequenceSpec) -> Verdict:
    """Keep the verifier's own tokens through the first that was not proposed, is a stop token or hits `max_length`."""
    kept: list[int] = []
    for position, token in enumerate(own):
        kept.append(token)
        ended = token in spec.stop_token_ids or claim.span.end + len(kept) >= spec.max_length
        if ended or position >= len(claim.proposed) or claim.proposed[position] != token:
            break
    agreed = len(kept) - 1 + (claim.proposed[len(kept) - 1 : len(kept)] == (kept[-1],))
    return Verdict(tuple(kept), agreed, ended)
