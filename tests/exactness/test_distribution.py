"""Samples follow the target's distribution exactly: a chi-square test that the published implementation would fail."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
import torch
from scipy import stats

from tests.exactness.cases import finish
from tests.random_models import plain_logits, random_pair, with_noise
from triforce_core.attention import KERNELS
from triforce_core.building.assembly import retrieval_decoder, target_engine
from triforce_core.building.draft_model import draft_proposer
from triforce_core.config import Settings
from triforce_core.engine.sequence import Request
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.messages import Claim, Proposal, SamplingParams, SequenceSpec, Span, Tier, Verdict, Work
from triforce_core.models.load import kv_geometry
from triforce_core.sampling.draw import Draw, draw_tokens
from triforce_core.sampling.warp import warp
from triforce_core.speculation.decoder import SpeculativeDecoder
from triforce_core.speculation.verification import judge

Tokens = tuple[int, ...]
LIKELY, IMPOSSIBLE = 1e-3, 1e-12  # p-values above and below which a sample is taken to follow a distribution, or not to


def p_value(samples: Sequence[Tokens], probabilities: Mapping[Tokens, float]) -> float:
    """The p-value of the chi-square test of `samples`. Outcomes that are expected less than 5 times count as
    one cell.
    """
    counts = Counter(samples)
    assert set(counts) <= {outcome for outcome, p in probabilities.items() if p > 0}, "something impossible was drawn"
    common = [outcome for outcome, p in probabilities.items() if p * len(samples) >= 5]
    observed, expected = [counts[o] for o in common], [probabilities[o] * len(samples) for o in common]
    rest = len(samples) - sum(expected)
    if rest > 1e-6:
        observed.append(len(samples) - sum(observed))
        expected.append(rest)
    return float(stats.chisquare(observed, expected).pvalue)


# -- the engine --------------------------------------------------------------------------------------------------------

VOCAB, PROMPT = 8, (3, 1, 4, 1, 5)


SLOW = [pytest.param(lookaheads, marks=pytest.mark.slow, id=str(lookaheads)) for lookaheads in [(2, 0), (0, 2), (0, 0)]]


@pytest.mark.parametrize("lookaheads", [(2, 1), *SLOW], ids=str)
@pytest.mark.parametrize(
    "params", [SamplingParams(), pytest.param(SamplingParams(0.7, top_p=0.9), marks=pytest.mark.slow)], ids=str
)
def test_the_engines_samples_follow_the_targets_distribution(
    params: SamplingParams, lookaheads: tuple[int, int]
) -> None:
    """The samples are three tokens long, from thousands of seeds in large batches. The drafters are often wrong."""
    target, theirs = random_pair(vocab_size=VOCAB, num_hidden_layers=1, seed=3)
    probabilities = {(): 1.0}
    for _ in range(3):
        rows = {t: warp(plain_logits(theirs, PROMPT + t)[-1:], [params])[0].double().softmax(-1) for t in probabilities}
        probabilities = {(*t, v): p * float(rows[t][v]) for t, p in probabilities.items() for v in range(VOCAB)}

    settings = Settings.model_validate({"dtype": "float32", "max_sequences": 128, "retrieval": {"budget": 64}})
    kv = RetrievalKV(kv_geometry(target), 128, ChunkSettings(64), 32, KERNELS["cpu_flash"])
    inner = retrieval_decoder(with_noise(target, 0.3), kv, draft_proposer(with_noise(target, 0.6), settings), settings)
    engine = target_engine(target, settings, inner, kv)
    outcome = finish(engine, [Request(PROMPT, 3, params, seed, lookaheads) for seed in range(4000)])
    fit = p_value(outcome.tokens, probabilities)
    print(f"\nchi-square over {sum(p > 0 for p in probabilities.values())} sequences: p = {fit:.3f}")
    assert fit > LIKELY
    if any(lookaheads):
        judged = [levels[0] for levels in outcome.tallies]
        acceptance = sum(t.accepted for t in judged) / sum(t.accepted + t.rejected for t in judged)
        print(f"acceptance at the target: {acceptance:.2f}")
        assert 0.2 < acceptance < 0.9, "drafters that are always right or always wrong would prove little"


# -- the published defect ----------------------------------------------------------------------------------------------

Probabilities = tuple[float, ...]
TARGET: Probabilities = (0.4, 0.4, 0.2)
DRAFT: Probabilities = (0.16, 0.34, 0.5)


def classical(
    proposal: int, proposed_by: Probabilities, own: Probabilities, correction: Probabilities, rng: random.Random
) -> int:
    """Accept with probability min(1, own / proposed_by), else draw from the correction (Leviathan et al. 2023)."""
    if rng.random() < own[proposal] / proposed_by[proposal]:
        return proposal
    return rng.choices(range(len(own)), correction)[0]


def residual(own: Probabilities, proposed_by: Probabilities) -> Probabilities:
    return tuple(max(p - q, 0.0) for p, q in zip(own, proposed_by, strict=True))


def hierarchical(
    target: Probabilities, middle: Probabilities, draft: Probabilities, *, defect: bool, rng: random.Random
) -> int:
    """Draw one token by two levels of classical speculative sampling.

    With the defect, the inner correction is drawn from the middle tier's own distribution in place of the residual, as
    in the published code. The middle tier then proposes by another distribution than the outer test assumes.
    """
    first = rng.choices(range(len(draft)), draft)[0]
    inner = middle if defect else residual(middle, draft)
    proposal = classical(first, draft, middle, inner, rng)
    outer = residual(target, middle)
    return classical(proposal, middle, target, outer if any(outer) else target, rng)


def expected(weights: Probabilities) -> dict[Tokens, float]:
    return {(token,): p for token, p in enumerate(weights)}


@pytest.mark.parametrize("middle", [TARGET, (0.25, 0.45, 0.3)], ids=["middle=target", "middle between"])
def test_the_test_fails_for_the_published_inner_correction(middle: Probabilities) -> None:
    rng = random.Random(0)
    right = [(hierarchical(TARGET, middle, DRAFT, defect=False, rng=rng),) for _ in range(50_000)]
    wrong = [(hierarchical(TARGET, middle, DRAFT, defect=True, rng=rng),) for _ in range(50_000)]
    print(f"\nresidual: p = {p_value(right, expected(TARGET)):.3f}; defect: p = {p_value(wrong, expected(TARGET)):.1e}")
    print("the defect draws", [round(sum(token == v for (token,) in wrong) / len(wrong), 3) for v in range(3)])
    assert p_value(right, expected(TARGET)) > LIKELY
    assert p_value(wrong, expected(TARGET)) < IMPOSSIBLE
    if middle == TARGET:
        assert p_value(wrong, expected((0.28, 0.46, 0.26))) > LIKELY, "what .4, .4, .2 becomes"


class TableTier:
    """A tier whose distribution is the same everywhere, drawn by the real sampler: the leaf, or a verifier."""

    def __init__(self, probabilities: Probabilities, tier: Tier) -> None:
        self.logits, self.tier = torch.tensor(probabilities).log(), tier
        self.waiting: list[Work] = []
        self.specs: dict[int, SequenceSpec] = {}

    def draw(self, spans: list[Span], counts: list[int]) -> list[list[int]]:
        """For each span, draw its next tokens, as many as `counts` says."""
        self.specs.update({span.sequence_id: span.spec for span in spans if span.spec is not None})
        specs = [self.specs[span.sequence_id] for span in spans]
        draws = [
            Draw(spec.sampling, spec.seed, span.end + i)
            for span, spec, count in zip(spans, specs, counts, strict=True)
            for i in range(count)
        ]
        tokens = iter(draw_tokens(self.logits.expand(len(draws), -1), draws))
        return [list(itertools.islice(tokens, count)) for count in counts]

    def verify(self, claims: list[Claim]) -> list[Verdict]:
        own = self.draw([c.span for c in claims], [len(c.proposed) + 1 for c in claims])
        return [judge(tokens, c, self.specs[c.span.sequence_id]) for tokens, c in zip(own, claims, strict=True)]

    def submit(self, work: list[Work]) -> None:
        self.waiting += work

    def collect(self, timeout_s: float) -> list[Proposal]:
        work, self.waiting = self.waiting, []
        own = self.draw([w.span for w in work], [w.lookaheads[0] for w in work])
        return [
            Proposal(w.span.sequence_id, w.span.end, tuple(tokens), bytes(len(tokens)))
            for w, tokens in zip(work, own, strict=True)
        ]

    def release(self, sequence_ids: list[int]) -> None:
        """This tier holds nothing."""


@pytest.mark.parametrize("middle", [TARGET, (0.25, 0.45, 0.3)], ids=["middle=target", "middle between"])
def test_our_two_levels_pass_it(middle: Probabilities) -> None:
    """The real decoders have the same three distributions. Tested are the first token of each block, and the first two
    together.
    """
    drafts = TableTier(DRAFT, Tier.DRAFT)
    chain = SpeculativeDecoder(
        SpeculativeDecoder(drafts, TableTier(middle, Tier.RETRIEVAL)), TableTier(TARGET, Tier.TARGET)
    )
    spec = [SequenceSpec(SamplingParams(), seed, 1, 100) for seed in range(4000)]
    chain.submit([Work(Span(i, 0, (0,), s), (2, 3, 2)) for i, s in enumerate(spec)])
    blocks = []
    while len(blocks) < len(spec):
        blocks += chain.collect(0.0)
    assert p_value([b.tokens[:1] for b in blocks], expected(TARGET)) > LIKELY
    pairs = {(a, b): TARGET[a] * TARGET[b] for a, b in itertools.product(range(3), repeat=2)}
    assert p_value([b.tokens[:2] for b in blocks], pairs) > LIKELY
