"""Audit: the target computes a share of its verified blocks again, one token at a time, as plain decoding would.

Where the target is exact (building/exactness.py), nothing differs. Elsewhere a pass over many tokens rounds differently
from passes over one, so a token may differ where two candidates tie, or one is at the edge of top-k or top-p. Rounding
moves all logits a little; a defect of the verifying pass moves some of them much further.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from triforce_core.attention import Scoring
from triforce_core.kv.base import Batch, KVCache, Placement, Row
from triforce_core.kv.ranges import Range, sliced
from triforce_core.messages import Claim, Verdict
from triforce_core.models.drawing import Drawer
from triforce_core.models.runner import ModelRunner

log = logging.getLogger(__name__)

# The largest difference of a logit that rounding alone causes, with a margin.
ROUNDING = {torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 0.8}


@dataclass(slots=True)
class AuditCounts:
    """What the audits of one target found."""

    rounding: float  # the bound on differences of logits that are taken for rounding
    blocks: int = 0
    tokens: int = 0
    ties: int = 0  # tokens that differ though no logit does by more than `rounding`
    mismatches: int = 0  # tokens whose logits differ by more, whether or not they are drawn alike: a defect
    skipped: int = 0  # blocks for which the KV pool had no spare slots
    largest_difference: float = 0.0  # between the logits of the two computations


class SpareSlots:
    """Stands in for the target's cache in audits: attention over its pool that changes none of its records."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring, batch: Batch) -> Tensor:
        return KVCache.attend(self.kv, layer, query, keys, values, scoring, batch)


class Audit:
    """Audits the blocks of one verifier, which calls `check` after each."""

    def __init__(self, runner: ModelRunner, kv: KVCache, drawer: Drawer, share: float, rounding: float) -> None:
        """`share` of the blocks are computed again, evenly spaced. `rounding`: the bound on differences of logits."""
        self.runner, self.kv, self.drawer, self.share = runner, kv, drawer, share
        self.counts = AuditCounts(rounding)
        self.due = 0.0  # blocks that the share asks for and that were not computed yet

    @torch.inference_mode()
    def check(self, claim: Claim, verdict: Verdict, logits: Tensor) -> None:
        """Compute the tokens of a verdict again. `logits`: those they were drawn from, [proposed + 1, vocab]."""
        self.due += self.share
        if self.due < 1 or not verdict.tokens:
            return
        self.due -= 1
        spare = self.kv.spare(len(verdict.tokens))
        if spare is None:
            self.counts.skipped += 1
            return
        try:
            # Only the rows of the verdict's tokens are computed again; later rows follow tokens that were not accepted.
            again = logits.clone()
            for index in range(len(verdict.tokens)):
                again[index] = self._one_token(claim, claim.span.end - 1, index, spare)
        finally:
            self.kv.allocator.free(spare)
        self._compare(claim, verdict, logits, again)

    def _one_token(self, claim: Claim, first: int, index: int, spare: list[Range]) -> Tensor:
        """The logits after the token at position first + index, [vocab]; the tokens from `first` on are in `spare`."""
        sequence_id, position = claim.span.sequence_id, first + index
        held = self.kv.held[sequence_id]
        placed = Placement(
            tokens=held.tokens[position : position + 1],
            positions=range(position, position + 1),
            writes=sliced(spare, index, index + 1),
            visible=[*sliced(held.ranges, 0, first), *sliced(spare, 0, index)],
        )
        return self.runner.run(Batch(SpareSlots(self.kv), [Row(sequence_id, 0, placed, num_sampled=1)]))[0]

    def _compare(self, claim: Claim, verdict: Verdict, logits: Tensor, again: Tensor) -> None:
        counts, num_tokens = self.counts, len(verdict.tokens)
        counts.blocks, counts.tokens = counts.blocks + 1, counts.tokens + num_tokens
        perturbed = self.drawer.perturbed({claim.span.sequence_id: again})[:num_tokens]
        best = perturbed.argmax(-1).tolist()
        differences = (again - logits)[:num_tokens].abs().amax(-1).nan_to_num(nan=torch.inf).tolist()
        for index, (token, other, difference) in enumerate(zip(verdict.tokens, best, differences, strict=True)):
            if difference < torch.inf:  # JSON has no infinity
                counts.largest_difference = max(counts.largest_difference, difference)
            defect = difference > counts.rounding
            counts.mismatches += defect
            counts.ties += not defect and other != token
            if not defect and other == token:
                continue
            gap = float(perturbed[index, other] - perturbed[index, token])
            log.log(
                logging.ERROR if defect else logging.INFO,
                f"audit: sequence {claim.span.sequence_id}, position {claim.span.end + index}: emitted token {token}, "
                f"one token at a time gives {other}; the gap of the perturbed logits is {gap:.2g}, logits differ by "
                f"{difference:.2g}: {'a defect' if defect else 'a tie of rounding'} (bound {counts.rounding:g})",
            )
