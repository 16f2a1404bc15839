"""Verification: a tier's model accepts or rejects the tokens proposed by the level below."""

from collections.abc import Sized
from dataclasses import replace

from triforce_core.kv.base import Forward
from triforce_core.messages import Claim, SequenceSpec, Tier, Verdict
from triforce_core.models.audit import Audit
from triforce_core.models.drawing import NO_TOKEN, Drawer, by_sequence
from triforce_core.models.runner import ModelRunner
from triforce_core.models.scoring import Scorer
from triforce_core.sampling.grammars import Grammars


class ModelVerifier:
    """Verifies with shared noise: a proposed token is accepted if and only if this tier draws the same token itself,
    has accepted all proposed tokens before it, and the text has not ended.
    """

    def __init__(self, runner: ModelRunner, tier: Tier, grammars: Grammars | None = None) -> None:
        """`grammars`: None if this tier decodes without them."""
        top = tier is Tier.TARGET
        self.runner, self.tier = runner, tier
        self.drawer = Drawer(runner, grammars, wait_for_grammars=top)
        self.scorer = Scorer() if top else None
        self.audit: Audit | None = None

    @property
    def held(self) -> Sized:
        """The sequences that its cache holds."""
        return self.runner.kv.held

    def verify(self, claims: list[Claim]) -> list[Verdict]:
        claims = [self._sound(claim) for claim in claims]
        num_drawn = {c.span.sequence_id: len(c.proposed) + 1 for c in claims if c.sample}
        passed, batch = self.runner.forward([self._forward(claim) for claim in claims])
        logits = by_sequence(passed, batch.rows)
        drawn = {i: part[len(part) - num_drawn[i] :] for i, part in logits.items() if i in num_drawn}
        own = self.drawer.draw(drawn)
        verdicts = []
        for claim in claims:
            sequence_id = claim.span.sequence_id
            if lack := batch.lacking.get(sequence_id):
                verdicts.append(Verdict(missing_from=lack.missing_from, snapshot_wanted=lack.snapshot_wanted))
                continue
            spec = self.runner.kv.held[sequence_id].spec
            verdict = judge(own[sequence_id], claim, spec) if claim.sample else Verdict()
            if self.audit is not None and claim.sample:
                self.audit.check(claim, verdict, drawn[sequence_id])
            if self.scorer is not None and sequence_id in logits:
                verdict = self.scorer.scored(verdict, claim, spec, logits[sequence_id])
            verdicts.append(verdict)
        return verdicts

    def release(self, sequence_ids: list[int]) -> None:
        self.runner.release(sequence_ids)
        self.drawer.release(sequence_ids)
        if self.scorer is not None:
            self.scorer.release(sequence_ids)

    def _forward(self, claim: Claim) -> Forward:
        num_sampled = len(claim.proposed) + 1 if claim.sample else 0
        if self.scorer is not None and (spec := self._spec(claim)) is not None:
            num_sampled = max(num_sampled, self.scorer.num_positions(claim, spec))
        if claim.parents:
            return Forward(claim.span, num_sampled, tree=claim.tree)
        return Forward(claim.span.extended(claim.proposed), num_sampled, len(claim.proposed))

    def _spec(self, claim: Claim) -> SequenceSpec | None:
        held = self.runner.kv.held.get(claim.span.sequence_id)
        return held.spec if held is not None else claim.span.spec

    def _sound(self, claim: Claim) -> Claim:
        """The claim with its proposal cut to the vocabulary, and to what fits the cache and `max_length`. Of a
        tree that the cache cannot take, its first path.
        """
        held, spec = self.runner.kv.held.get(claim.span.sequence_id), claim.span.spec
        longest = self.runner.kv.room(held) if held is not None else spec.max_length if spec is not None else 0
        vocab_size = self.runner.model.config.vocab_size
        room = max(0, longest - claim.span.end)
        tree = claim.tree.kept(lambda token, depth: 0 <= token < vocab_size and depth < room)
        if not tree.is_chain and len(tree.tokens) > self.runner.kv.most_nodes:
            tree = tree.first_path()
        return replace(claim, proposed=tree.tokens, parents=() if tree.is_chain else tree.parents)


def judge(own: list[int], claim: Claim, spec: SequenceSpec) -> Verdict:
    """Keep the verifier's own tokens: `own` has that after the span, then that after each proposed one. Stop after a
    token that was not proposed there, after a stop token, at `max_length`, or before a position at which every token is
    excluded.
    """
    kept: list[int] = []
    tree, at = claim.tree, -1
    while True:
        token = own[at + 1]
        if token == NO_TOKEN:
            return Verdict(tuple(kept), len(kept), no_token=True)
        kept.append(token)
        ended = token in spec.stop_token_ids or claim.span.end + len(kept) >= spec.max_length
        proposed = tree.child(at, token)
        if ended or proposed is None:
            return Verdict(tuple(kept), len(kept) - (proposed is None), ended)
        at = proposed
