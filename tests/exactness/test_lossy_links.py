"""Real models and caches over links that delay, lose and repeat, with tiers that restart: plain decoding's tokens."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from transformers import PreTrainedModel

from tests.exactness.cases import AnyPlan, CountingRetrievalKV, Tokens, finish
from tests.integrity import check
from tests.lossy_link import LossyLink
from tests.random_models import random_model, random_tokens, with_noise
from triforce_core.attention import KERNELS
from triforce_core.building.assembly import target_engine
from triforce_core.building.draft_model import draft_proposer
from triforce_core.config import Settings
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.messages import Drafting, Proposal, Proposer, SamplingParams, Tally, Tier, Work
from triforce_core.models.load import ATTENTION, kv_geometry
from triforce_core.models.runner import ModelRunner
from triforce_core.speculation.decoder import SpeculativeDecoder
from triforce_core.speculation.leaf import Leaf
from triforce_core.speculation.run_ahead import RunAhead
from triforce_core.speculation.verification import ModelVerifier

VOCAB, BUDGET, TAIL = 50, 48, 14
SETTINGS = Settings.model_validate(
    {
        "dtype": "float32",
        "max_sequences": 3,
        "target": {"prefill_chunk": 50, "kv_pool_tokens": 500},
        "retrieval": {"budget": BUDGET, "chunk": 8, "refresh_every": 10},
        "draft": {"window": 20},
    }
)


def one_layer(vocab_size: int) -> PreTrainedModel:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    model = random_model(vocab_size=vocab_size, initializer_range=0.3, **sizes)
    model.set_attn_implementation(ATTENTION)
    return model


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return one_layer(VOCAB)


class LossyChain:
    """Three tiers of which the lower two are elsewhere; also the sink that takes snapshots there, late or never."""

    def __init__(
        self,
        target: PreTrainedModel,
        rng: random.Random,
        events: Counter[str],
        micro_batches: int,
        *,
        by_lookup: bool = False,
    ) -> None:
        self.rng, self.events, self.micro_batches, self.by_lookup = rng, events, micro_batches, by_lookup
        self.faults, self.patience = rng.choice([0.0, 0.03, 0.15]), rng.choice([4, 20])
        self.retrieval = with_noise(
            one_layer(target.config.vocab_size), rng.choice([0.0, 0.1]), seed=rng.randrange(100)
        )
        self.drafter = with_noise(one_layer(target.config.vocab_size), rng.choice([0.02, 0.2]), seed=rng.randrange(100))
        self.on_the_way: dict[int, tuple[int, Snapshot]] = {}
        self.versions: dict[int, int] = {}  # that the target knows to have arrived
        self.kv: CountingRetrievalKV
        self.drafts: Leaf
        below = self.link(self.make_retrieval)
        retrieval = SETTINGS.retrieval.model_copy(update={"refresh_every": rng.choice([10, 1, 4])})
        settings = SETTINGS.model_copy(update={"retrieval": retrieval})
        self.engine = target_engine(target, settings, below, self, micro_batches=micro_batches)
        assert self.engine.controller is not None
        self.engine.controller = AnyPlan(SETTINGS.speculation.lookaheads, tuple(Drafting), rng.randrange(1000))

    def link(self, make_peer) -> LossyLink:  # type: ignore[no-untyped-def]
        return LossyLink(make_peer, self.rng, self.events, faults=self.faults, patience=self.patience)

    def make_retrieval(self) -> Proposer:
        self.kv = CountingRetrievalKV(kv_geometry(self.retrieval), 3, ChunkSettings(BUDGET), TAIL, KERNELS["cpu_flash"])
        self.kv.events = self.events
        verifier = ModelVerifier(ModelRunner(self.retrieval, self.kv), Tier.RETRIEVAL)
        several = self.micro_batches
        drafts = self.link(self.make_drafts)
        decoder = SpeculativeDecoder(drafts, verifier, micro_batches=several, hand_up_early=several > 1)
        return RunAhead(decoder, self.micro_batches)

    def make_drafts(self) -> Proposer:
        self.drafts = Leaf() if self.by_lookup else draft_proposer(self.drafter, SETTINGS)
        return self.drafts

    def deliver(self, snapshot: Snapshot) -> None:
        self.on_the_way[snapshot.sequence_id] = self.rng.choice([0, 0, 2, 6]), snapshot

    def busy(self, sequence_id: int) -> bool:
        """The engine asks this once a round for each request, so this is also the clock."""
        turns, snapshot = self.on_the_way.pop(sequence_id, (0, None))
        if turns and snapshot:
            self.on_the_way[sequence_id] = turns - 1, snapshot
        elif snapshot and self.rng.random() >= self.faults:
            kind = "changes" if snapshot.changes else "whole"
            if self.kv.take(snapshot):
                self.events[f"hand-over: {kind} taken"] += 1
                if self.rng.random() >= self.faults:  # else it is here, and the target does not know
                    self.versions[sequence_id] = snapshot.version
            else:
                self.events[f"hand-over: {kind} refused"] += 1
        return sequence_id in self.on_the_way

    def confirmed(self, sequence_id: int) -> int:
        return self.versions.get(sequence_id, 0)

    def requests(self) -> list[Request]:
        rng, vocab = self.rng, self.retrieval.config.vocab_size
        return [
            Request(
                random_tokens(rng.choice([1, 20, 60, 150]), seed=rng.randrange(1000), vocab=vocab),
                max_tokens=rng.choice([3, 50, 50]),
                sampling=SamplingParams(rng.choice([0.0, 0.7, 1.0]), top_p=rng.choice([0.9, 1.0])),
                seed=rng.randrange(1000),
                lookaheads=rng.choice([None, (rng.choice([0, 1, 4, 8, 8]), rng.choice([0, 1, 3]))]),
                drafting=rng.choice([*Drafting]),
            )
            for _ in range(rng.randint(1, 4))
        ]


def plain(engine: Engine, request: Request) -> Tokens:
    alone = Request(request.prompt, request.max_tokens, request.sampling, request.seed, (0, 0))
    return finish(engine, [alone]).tokens[0]


@pytest.mark.parametrize("micro_batches", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 3))])
def test_faults_change_no_token(target: PreTrainedModel, micro_batches: int) -> None:
    events: Counter[str] = Counter()
    accepted = 0
    for run in range(25):
        chain = LossyChain(target, random.Random(run), events, micro_batches)
        requests = chain.requests()
        outcome = finish(chain.engine, requests)
        assert outcome.tokens == [plain(chain.engine, r) for r in requests], f"run {run}"
        accepted += sum(levels[0].accepted for levels in outcome.tallies)
        assert chain.drafts.runner is not None
        assert not chain.drafts.held, "the draft tier keeps a sequence that has ended"
        caches = [chain.engine.scheduler.kv, chain.kv, chain.drafts.runner.kv]
        assert not any(kv.held for kv in caches), "a tier keeps a sequence that has ended"
        assert not any(kv.used_tokens for kv in caches)
        check(chain.engine.scheduler.kv)
    print(f"\n{accepted} accepted", *(f"{n:7d}  {name}" for name, n in sorted(events.items())), sep="\n")
    assert accepted > 200
    mishaps = ["work lost", "answer lost", "answer twice", "answer late or repeated", "gave up waiting"]
    expected = [
        *(f"link: {m}" for m in [*mishaps, "peer restarted"]),
        "RETRIEVAL: refresh in mid-stream",
        "RETRIEVAL: full tail",
        "hand-over: whole taken",
        "hand-over: changes taken",
    ]
    assert not [e for e in expected if events[e] < 20]
    assert events["hand-over: changes refused"] >= 10


@pytest.mark.ci
def test_faults_change_no_token_of_prompt_lookup() -> None:
    """The vocabulary has five tokens, so every text repeats itself."""
    target = one_layer(vocab_size=5)
    events: Counter[str] = Counter()
    drafted = 0
    for run in range(25):
        chain = LossyChain(target, random.Random(run), events, 1 + run % 3, by_lookup=True)
        requests = chain.requests()
        outcome = finish(chain.engine, requests)
        assert outcome.tokens == [plain(chain.engine, r) for r in requests], f"run {run}"
        assert not chain.drafts.held, "the draft tier keeps a sequence that has ended"
        drafted += sum(levels[1].accepted for levels in outcome.tallies)
    assert drafted > 100
    assert min(events[f"link: {mishap}"] for mishap in ("work lost", "answer twice", "peer restarted")) >= 20


class Liar:
    """A proposer that answers anything: tokens that are none, blocks without end, lacks and tallies out of the air."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.waiting: list[Work] = []

    def submit(self, work: list[Work]) -> None:
        self.waiting += work

    def collect(self, timeout_s: float) -> list[Proposal]:
        work, self.waiting = self.waiting, []
        return [self.lie(w) for w in work]

    def lie(self, work: Work) -> Proposal:
        rng = self.rng
        tokens = tuple(rng.randrange(-2, VOCAB + 2) for _ in range(rng.choice([0, 1, 5, 200])))
        return Proposal(
            work.span.sequence_id,
            work.span.end,
            tokens,
            bytes(len(tokens)),
            missing_from=rng.choice([None, 0, rng.randint(0, work.span.end)]),
            snapshot_wanted=rng.random() < 0.5,
            tallies=(Tally(rounds=9),) * rng.randint(0, 5),
        )

    def release(self, sequence_ids: list[int]) -> None:
        self.waiting = [w for w in self.waiting if w.span.sequence_id not in sequence_ids]

    def deliver(self, snapshot: Snapshot) -> None:
        """Snapshots are ignored."""

    def busy(self, sequence_id: int) -> bool:
        return False

    def confirmed(self, sequence_id: int) -> int:
        """Return any version, also of snapshots that were never cut."""
        return self.rng.randrange(5)


def test_lies_change_no_token(target: PreTrainedModel) -> None:
    """What a tier proposes is checked before the model sees it: a broken drafter costs time only."""
    for run in range(10):
        liar = Liar(random.Random(run))
        engine = target_engine(target, SETTINGS, liar, liar)
        requests = [
            Request(random_tokens(n, seed=run + n, vocab=VOCAB), 30, SamplingParams(0.8), run, (4, 2))
            for n in (1, 9, 70)
        ]
        assert finish(engine, requests).tokens == [plain(engine, r) for r in requests]
