"""Tiers that sleep for given times instead of running models, in the real actors, links and loops.

They stand in for a cluster that is not at hand. Acceptance is given too; every figure from them is labelled as paced.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from actors.tiers import DraftActor, RetrievalActor, TargetActor, TierActor
from triforce_core.attention import KERNELS
from triforce_core.config import Settings
from triforce_core.decoder import SpeculativeDecoder, Verifier
from triforce_core.doorbell import Doorbell
from triforce_core.engine.engine import Engine, SnapshotSchedule
from triforce_core.engine.limits import Limits
from triforce_core.engine.scheduler import Scheduler
from triforce_core.engine.sequence import Sequence
from triforce_core.errors import InvalidValueError, require
from triforce_core.kv.base import KVGeometry
from triforce_core.kv.full import FullKV
from triforce_core.messages import Claim, Proposal, Proposer, SequenceSpec, Tally, Tier, Verdict, Work
from triforce_core.verification import judge
from triforce_tools.bench.synthetic import chance
from triforce_tools.tiers.timeline import TIMELINE

VOCAB_SIZE = 1000
POOL_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Pace:
    """Milliseconds of a draft step and of retrieval and target passes, whatever the batch, and chances of acceptance.

    `draft_acceptance` is the chance that the retrieval tier accepts a token of the draft tier, `retrieval_acceptance`
    the chance that the target accepts a token of the retrieval tier.
    """

    draft_ms: float
    retrieval_ms: float
    target_ms: float
    draft_acceptance: float
    retrieval_acceptance: float

    @classmethod
    def parse(cls, text: str) -> Pace:
        """A pace from text such as `.5,4.6,21,.6,.92`. Raises `InvalidValueError`."""
        try:
            pace = cls(*map(float, text.split(",")))
        except (TypeError, ValueError):
            rule = "must be five numbers: ms of draft, retrieval, target; acceptance of draft, of retrieval"
            raise InvalidValueError("paced", text, rule) from None
        require(min(pace.draft_ms, pace.retrieval_ms, pace.target_ms) >= 0, "paced", text, "times must be 0 or more")
        chances = (pace.draft_acceptance, pace.retrieval_acceptance)
        require(all(0 <= chance <= 1 for chance in chances), "paced", text, "acceptances must be between 0 and 1")
        return pace

    def ms(self, tier: Tier) -> float:
        return (self.draft_ms, self.retrieval_ms, self.target_ms)[tier]

    def token(self, tier: Tier, seed: int, position: int) -> int:
        """A tier's token at this position: the token of the tier above, or another one where that tier is to reject."""
        token = int(VOCAB_SIZE * chance(seed, position, "target"))
        for below, acceptance in ((Tier.RETRIEVAL, self.retrieval_acceptance), (Tier.DRAFT, self.draft_acceptance)):
            if tier <= below and chance(seed, position, below.name) >= acceptance:
                token = (token + 1) % VOCAB_SIZE
        return token


def sleep_until(moment: float) -> None:
    """Sleep until a moment in monotonic seconds.

    The system's sleep may end a tenth of a millisecond late, so the last tenth is spent in a loop.
    """
    time.sleep(max(0.0, moment - time.monotonic() - 1e-4))
    while time.monotonic() < moment:
        pass


class PacedTier:
    """The common part of paced verifiers and proposers: the specs of their sequences."""

    def __init__(self, pace: Pace, tier: Tier) -> None:
        self.pace, self.tier = pace, tier
        self.specs: dict[int, SequenceSpec] = {}

    def work(self, batch: int, tokens: int) -> None:
        moment = time.monotonic() + self.pace.ms(self.tier) / 1e3
        with TIMELINE.stage(self.tier, batch, tokens):
            sleep_until(moment)

    def draw(self, sequence_id: int, positions: Iterable[int]) -> list[int]:
        return [self.pace.token(self.tier, self.specs[sequence_id].seed, position) for position in positions]

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.specs.pop(sequence_id, None)


class PacedVerifier(PacedTier):
    """Verifies without a model."""

    def verify(self, claims: list[Claim]) -> list[Verdict]:
        sampled = [c for c in claims if c.sample]
        for claim in claims:
            if claim.span.spec is not None:
                self.specs[claim.span.sequence_id] = claim.span.spec
        if sampled:  # prompts cost no time
            self.work(len(sampled), sum(len(c.proposed) + 1 for c in sampled))
        return [self._verdict(claim) for claim in claims]

    def _verdict(self, claim: Claim) -> Verdict:
        spec = self.specs.get(claim.span.sequence_id)
        if spec is None:
            return Verdict(missing_from=0)
        if not claim.sample:
            return Verdict()
        end = claim.span.end
        proposed = claim.proposed[: max(0, spec.max_length - end)]
        own = self.draw(claim.span.sequence_id, range(end, end + len(proposed) + 1))
        return judge(own, Claim(claim.span, proposed), spec)


class PacedProposer(PacedTier):
    """Drafts without a model."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(pace, Tier.DRAFT)
        self.waiting: dict[int, Work] = {}

    def submit(self, work: list[Work]) -> None:
        for w in work:
            self.waiting[w.span.sequence_id] = w
            if w.span.spec is not None:
                self.specs[w.span.sequence_id] = w.span.spec

    def collect(self, timeout_s: float) -> list[Proposal]:
        work, self.waiting = self.waiting, {}
        for _ in range(max((w.lookaheads[0] for w in work.values()), default=0)):
            self.work(len(work), len(work))
        return [self._propose(w) for w in work.values()]

    def _propose(self, work: Work) -> Proposal:
        sequence_id, end = work.span.sequence_id, work.span.end
        if sequence_id not in self.specs:
            return Proposal(sequence_id, end, missing_from=0, tallies=(Tally(),))
        stop = min(end + work.lookaheads[0], self.specs[sequence_id].max_length - 1)
        tokens = tuple(self.draw(sequence_id, range(end, stop)))
        return Proposal(sequence_id, end, tokens, bytes([self.tier]) * len(tokens), tallies=(Tally(),))


class PacedTarget(PacedVerifier):
    """The target's verifier. Its KV pool has minimal geometry; only the scheduler uses it, to admit requests."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(pace, Tier.TARGET)
        geometry = KVGeometry(1, 1, 1, torch.float32, torch.device("cpu"))
        self.kv = FullKV(geometry, POOL_TOKENS, KERNELS["reference"])

    def release(self, sequence_ids: list[int]) -> None:
        super().release(sequence_ids)
        for sequence_id in sequence_ids:
            self.kv.release(sequence_id)


class NoSnapshots(SnapshotSchedule):
    """A schedule without snapshots, because there is no KV to hand over."""

    def __init__(self) -> None:
        """Needs nothing but the name of a selector, which no request uses."""
        self.selector = "streaming"

    def update(self, sequence: Sequence, *, wanted: bool) -> bool:
        """Nothing to do."""
        return False

    def saw(self, sequence: Sequence, tally: Tally) -> None:
        """Nothing to note."""


def paced_engine(pace: Pace, settings: Settings, below: Proposer, doorbell: Doorbell) -> Engine:
    target = PacedTarget(pace)
    decoder = SpeculativeDecoder(below, target, micro_batches=settings.micro_batches)
    scheduler = Scheduler(target.kv, max_sequences=settings.max_sequences, prefill_chunk=1 << 20)
    return Engine(decoder, scheduler, NoSnapshots(), Limits(POOL_TOKENS, POOL_TOKENS, VOCAB_SIZE), doorbell=doorbell)


class PacedDraftActor(DraftActor):
    def __init__(self, settings: Settings, pace: Pace) -> None:
        super().__init__(settings)
        self.pace = pace

    def proposer(self) -> Proposer:
        return PacedProposer(self.pace)


class PacedRetrievalActor(RetrievalActor):
    def __init__(self, settings: Settings, draft: str, pace: Pace) -> None:
        super().__init__(settings, draft)
        self.pace = pace

    def verifier(self) -> Verifier:
        return PacedVerifier(self.pace, Tier.RETRIEVAL)


class PacedTargetActor(TargetActor):
    def __init__(self, settings: Settings, retrieval: str, pace: Pace) -> None:
        super().__init__(settings, retrieval)
        self.pace = pace

    def engine(self) -> Engine:
        doorbell = Doorbell()
        link = self.connect(self.retrieval, self.settings.server.link_timeout_s, doorbell)
        return paced_engine(self.pace, self.settings, link, doorbell)


PACED: dict[str, type[TierActor]] = {
    "draft": PacedDraftActor,
    "retrieval": PacedRetrievalActor,
    "target": PacedTargetActor,
}
