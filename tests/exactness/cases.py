"""The cases of the exactness tests, and the wiring that runs one: three tiers with models of their own, and counters.

Cases are data: they may be run in one process, as here, or by three actors.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from tests.pairwise import all_pairs
from tests.random_models import random_model, random_tokens, with_noise
from triforce_core.attention import KERNELS
from triforce_core.building.assembly import retrieval_decoder, target_engine
from triforce_core.building.draft_model import draft_proposer
from triforce_core.config import Settings
from triforce_core.engine.controller import Controller
from triforce_core.engine.engine import Engine, run_to_end
from triforce_core.engine.sequence import Request, Sequence
from triforce_core.kv.base import Held, Lack, Placement
from triforce_core.kv.retrieval import RetrievalHeld, RetrievalKV
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.messages import GREEDY, Claim, Drafting, Proposer, SamplingParams, Tally, Tier, Verdict
from triforce_core.models.load import ATTENTION, kv_geometry, load_model
from triforce_core.plans import PLAIN, Plan
from triforce_core.speculation.decoder import SpeculativeDecoder, Verifier

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One point of the covering set. Sizes in tokens; noise is relative to the spread of each weight matrix."""

    temperature: float
    top_p: float
    lookaheads: tuple[int, int]
    budget: int
    chunk: int
    batch: int
    retrieval_noise: float
    draft_noise: float
    refresh: tuple[int, int]  # refresh_every, tail
    window: int  # of the draft tier
    model: str = "llama"

    def __str__(self) -> str:
        return "-".join(str(getattr(self, name)).replace(" ", "") for name in self.__dataclass_fields__)

    @property
    def seed(self) -> int:
        return sum(ord(c) * 31**i for i, c in enumerate(str(self))) % 2**40

    @property
    def settings(self) -> Settings:
        return Settings.model_validate(
            {
                "dtype": "float32",
                "max_sequences": 5,
                "target": {"prefill_chunk": 300, "kv_pool_tokens": 16_384},
                "retrieval": {
                    "budget": self.budget,
                    "chunk": self.chunk,
                    "refresh_every": self.refresh[0],
                },
                "draft": {"window": self.window},
            }
        )

    def requests(self, num_tokens: int, prompts: Tokens) -> list[Request]:
        """`prompts` is a text to cut prompts from, at least three times the budget long."""
        retrieval, draft = self.lookaheads
        if self.batch == 1:
            lengths, lookaheads = [self.budget + 3 * self.chunk + 17], [self.lookaheads]
        else:
            lengths = [self.budget + 2 * self.chunk + 5, 1, 2 * self.budget + 3, self.budget // 2 + 1, 7]
            lookaheads = [self.lookaheads, (retrieval, draft), (0, 0), (retrieval, 0), (0, draft)]
            lookaheads[1] = (max(1, retrieval // 2), draft + 1)
        first = range(0, 5 * 11, 11)
        return [
            Request(
                prompt=prompts[first[i] : first[i] + lengths[i]],
                max_tokens=num_tokens,
                sampling=SamplingParams(self.temperature, top_p=self.top_p),
                seed=self.seed + i,
                lookaheads=lookaheads[i],
            )
            for i in range(self.batch)
        ]


FACTORS: dict[str, Any] = {
    "temperature": [0.0, 0.6, 1.0, 1.3],
    "top_p": [0.9, 1.0],
    "lookaheads": [(1, 1), (4, 2), (8, 3), (16, 4)],
    "budget": [64, 128, 1024],
    "chunk": [1, 8, 32],
    "batch": [1, 5],
    "retrieval_noise": [0.0, 0.05, 0.15, 0.4],
    "draft_noise": [0.0, 0.1, 0.4],
    "refresh": [(16, 200), (1000, 40)],  # the second refreshes only because the tail is full
    "window": [60, 3000],
}
COVERING = [Case(**row) for row in all_pairs(FACTORS, seed=0)]
DEMO = [
    Case(0.0, 1.0, (8, 3), 128, 8, 1, 0.0, 0.1, (16, 200), 60, "demo"),
    Case(1.0, 0.9, (4, 2), 64, 8, 5, 0.02, 0.05, (1000, 40), 252, "demo"),
    Case(0.6, 1.0, (16, 4), 1024, 32, 1, 0.02, 0.1, (16, 200), 60, "demo"),
    Case(1.3, 1.0, (1, 1), 128, 1, 5, 0.0, 0.05, (16, 200), 60, "demo"),
]
# Drafters that are the target: where the budget and the window hold the whole text, all that they propose is accepted.
PERFECT = Case(1.0, 1.0, (4, 2), 1024, 8, 5, 0.0, 0.0, (16, 200), 3000)
CASES = [*COVERING, *DEMO, PERFECT]


@dataclass
class Outcome:
    """What a run gave: each request's tokens, and what happened on the way."""

    tokens: list[Tokens]
    tallies: list[list[Tally]]  # of each request: at the target, the retrieval and the draft level
    events: Counter[str] = field(default_factory=Counter)

    def acceptances(self, level: Tier) -> list[float]:
        """The acceptance of each request for which the level judged at least ten tokens."""
        found = [levels[Tier.TARGET - level] for levels in self.tallies]
        return [t.acceptance for t in found if t.acceptance is not None and t.accepted + t.rejected >= 10]


def models(case: Case) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
    """Target, retrieval and drafter: the latter two are the target with noise on its weights."""
    if case.model == "demo":
        target = load_model("demo", "target", "float32", "cpu")
    else:
        target = random_model(case.model)
        target.set_attn_implementation(ATTENTION)
    retrieval = with_noise(target, case.retrieval_noise, seed=1) if case.retrieval_noise else target
    return target, retrieval, with_noise(target, case.draft_noise, seed=2) if case.draft_noise else target


class CountingVerifier:
    """Counts what became of the proposals that a level judged."""

    def __init__(self, verifier: Verifier, events: Counter[str]) -> None:
        self.verifier, self.tier, self.events = verifier, verifier.tier, events

    def verify(self, claims: list[Claim]) -> list[Verdict]:
        verdicts = self.verifier.verify(claims)
        for claim, verdict in zip(claims, verdicts, strict=True):
            proposed, accepted = len(claim.proposed), verdict.num_accepted
            if proposed and verdict.tokens:
                if accepted == proposed:
                    kind = "full acceptance with a bonus token" if len(verdict.tokens) > proposed else "full acceptance"
                else:
                    kind = "partial acceptance" if accepted else "zero acceptance"
                self.events[f"{self.tier.name}: {kind}"] += 1
        return verdicts

    def release(self, sequence_ids: list[int]) -> None:
        self.verifier.release(sequence_ids)


class CountingRetrievalKV(RetrievalKV):
    """Counts refreshes in mid-stream and full tails."""

    events: Counter[str]

    def place(self, sequence_id: int, held: Held, keep: int, end: int, num_sampled: int) -> Placement | Lack:
        assert isinstance(held, RetrievalHeld)
        before = held.version
        placed = super().place(sequence_id, held, keep, end, num_sampled)
        self.events["RETRIEVAL: refresh in mid-stream"] += 0 < before < held.version
        self.events["RETRIEVAL: full tail"] += isinstance(placed, Lack) and placed.snapshot_wanted and before > 0
        return placed


def engine_for(case: Case, events: Counter[str], requests: list[Request], graphs: str = "off") -> Engine:
    """The chain of building/assembly.py, with models of each tier's own, the case's tail, counters, and a pool that the
    requests fill.
    """
    target, retrieval, drafter = models(case)
    pool_tokens = sum(len(r.prompt) + r.max_tokens for r in requests)
    of_target = case.settings.target.model_copy(update={"kv_pool_tokens": pool_tokens})
    settings = case.settings.model_copy(update={"graphs": graphs, "target": of_target})
    chunks = ChunkSettings.halved(case.budget, case.chunk)
    kv = CountingRetrievalKV(kv_geometry(retrieval), 5, chunks, case.refresh[1], KERNELS["cpu_flash"])
    kv.events = events
    inner = retrieval_decoder(retrieval, kv, draft_proposer(drafter, settings), settings)
    engine = target_engine(target, settings, counted(inner, events), kv)
    counted(engine.decoder, events)
    return engine


def counted(decoder: Proposer, events: Counter[str]) -> SpeculativeDecoder:
    assert isinstance(decoder, SpeculativeDecoder)
    decoder.verifier = CountingVerifier(decoder.verifier, events)
    return decoder


def finish(engine: Engine, requests: list[Request]) -> Outcome:
    """Run requests together to their ends."""
    got: dict[int, Tokens] = {}
    tallies: dict[int, list[Tally]] = {}
    for output in run_to_end(engine, requests):
        got[output.sequence_id] = got.get(output.sequence_id, ()) + output.tokens
        tallies[output.sequence_id] = [tally.counts for tally in output.stats.tallies]
    return Outcome([got[i] for i in sorted(got)], [tallies[i] for i in sorted(got)])


def speculate(case: Case, num_tokens: int, prompts: Tokens, graphs: str = "off") -> Outcome:
    """Run the case's requests in one batch, through all tiers."""
    events: Counter[str] = Counter()
    requests = case.requests(num_tokens, prompts)
    outcome = finish(engine_for(case, events, requests, graphs), requests)
    outcome.events = events
    return outcome


def decode_plainly(case: Case, num_tokens: int, prompts: Tokens) -> list[Tokens]:
    """Run the same requests, each alone, with no tier but the target."""
    plain = [Request(r.prompt, r.max_tokens, r.sampling, r.seed, (0, 0)) for r in case.requests(num_tokens, prompts)]
    engine = engine_for(case, Counter(), plain)
    return [finish(engine, [request]).tokens[0] for request in plain]


def mixed_requests(temperature: float, longer: int, more: int) -> list[Request]:
    """Ten requests for batches in which sequences come and go. Prompts have four lengths, from 3 tokens on in steps of
    `longer`; outputs have `more` tokens or some more; and there are all kinds of lookaheads.
    """
    sampling = SamplingParams(temperature) if temperature else GREEDY
    lookaheads = [(8, 3), (4, 1), (3, 0), (0, 2), (6, 12)]
    return [
        Request(random_tokens(3 + longer * (i % 4), seed=i), more + 13 * (i % 4), sampling, i, lookaheads[i % 5])
        for i in range(10)
    ]


def random_prompts(case: Case) -> Tokens:
    return random_tokens(3 * case.budget + 100, seed=case.seed % 1000)


class AnyPlan(Controller):
    """Draws plans at random. A request's next plan may be the one that was drawn last, for whichever request."""

    def __init__(self, lookaheads: tuple[int, int], draftings: tuple[Drafting, ...], seed: int = 0) -> None:
        super().__init__(lookaheads, draftings)
        self.lookaheads, self.rng = lookaheads, random.Random(seed)
        self.drawn = PLAIN

    def plan(self, decoding: Several[Sequence]) -> Plan:
        super().plan(decoding)  # what it would do must not raise
        (retrieval, draft), choice = self.lookaheads, self.rng.choice
        if self.rng.random() >= 0.4:
            above = choice((0, 0, 1, retrieval // 2, retrieval))
            below = choice((0, 1, draft, draft if above else retrieval + draft))
            self.drawn = Plan(above, below, choice([*Drafting]), choice((0, 3, 16)), choice((0.0, 0.2, 0.6)))
        return self.drawn
