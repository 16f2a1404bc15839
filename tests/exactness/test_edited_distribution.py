"""With top-p, penalties and a mask on, samples follow the distribution that their definitions give."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast, RepetitionPenaltyLogitsProcessor

from tests.exactness.cases import finish
from tests.exactness.test_distribution import IMPOSSIBLE, LIKELY, PROMPT, Tokens, hierarchical, p_value
from tests.random_models import plain_logits, random_pair, with_noise
from triforce_core.attention import KERNELS
from triforce_core.building.assembly import retrieval_decoder, target_engine
from triforce_core.building.draft_model import draft_proposer
from triforce_core.config import Settings
from triforce_core.engine.engine import Engine
from triforce_core.engine.sequence import Request
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.snapshot import ChunkSettings
from triforce_core.messages import SamplingParams
from triforce_core.models.drawing import Drawer, LogitsOf
from triforce_core.models.load import kv_geometry
from triforce_core.sampling.draw import Draw
from triforce_core.sampling.guides import Guide
from triforce_core.sampling.warp import warp

TEXTS = [*"abcdefgh", "<end>"]  # of each token
VOCAB = len(TEXTS)
LENGTH = 2  # tokens of an output
# The mask: which letters may stand at each place of the output.
PLACES = ["abcdefg", "bcdefgh"]
GRAMMAR = Guide("regex", "".join(f"[{letters}]" for letters in PLACES) + "[a-h]").grammar()
TARGET, THEIRS = random_pair(vocab_size=VOCAB, num_hidden_layers=1, seed=3)
RETRIEVAL, DRAFTER = with_noise(TARGET, 0.3), with_noise(TARGET, 0.6)


def sampling(temperature: float) -> SamplingParams:
    return SamplingParams(temperature, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, without weights, whose tokenizer knows eight letters."""
    letters = Tokenizer(BPE(vocab={text: token for token, text in enumerate(TEXTS)}, merges=[]))
    letters.decoder = ByteLevel()
    folder = tmp_path_factory.mktemp("letters")
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>").save_pretrained(folder)
    TARGET.config.save_pretrained(folder)
    return folder


def engine(tokenizer: Path) -> Engine:
    settings = Settings.model_validate(
        {"dtype": "float32", "max_sequences": 128, "retrieval": {"budget": 64}, "target": {"model": str(tokenizer)}}
    )
    kv = RetrievalKV(kv_geometry(TARGET), 128, ChunkSettings(64), 32, KERNELS["cpu_flash"])
    inner = retrieval_decoder(RETRIEVAL, kv, draft_proposer(DRAFTER, settings), settings)
    return target_engine(TARGET, settings, inner, kv)


def distribution(logits: Tensor, output: Tokens, params: SamplingParams) -> list[float]:
    """The distribution of the token after `output`, by the definitions of all parameters."""
    text = torch.tensor([[*PROMPT, *output]])
    row = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(text, logits[None].clone())[0]
    for token in range(VOCAB):
        count = output.count(token)
        row[token] -= count * params.frequency_penalty + bool(count) * params.presence_penalty
        if TEXTS[token] not in PLACES[len(output)]:
            row[token] = -torch.inf
    return warp(row[None], [SamplingParams(params.temperature, top_p=params.top_p)])[0].double().softmax(-1).tolist()


def expected(params: SamplingParams) -> dict[Tokens, float]:
    probabilities: dict[Tokens, float] = {(): 1.0}
    for _ in range(LENGTH):
        rows = {t: distribution(plain_logits(THEIRS, PROMPT + t)[-1], t, params) for t in probabilities}
        probabilities = {(*t, v): p * rows[t][v] for t, p in probabilities.items() for v in range(VOCAB)}
    return probabilities


def samples(tokenizer: Path, params: SamplingParams, lookaheads: tuple[int, int], count: int) -> list[Tokens]:
    # One token more than is judged: nothing is drafted for the last one.
    requests = [Request(PROMPT, LENGTH + 1, params, seed, lookaheads, grammar=GRAMMAR) for seed in range(count)]
    outcome = finish(engine(tokenizer), requests)
    judged = [levels[0] for levels in outcome.tallies]
    assert sum(t.accepted for t in judged) > count / 10
    assert sum(t.rejected for t in judged) > count / 10
    return [tokens[:LENGTH] for tokens in outcome.tokens]


# Temperature and lookaheads.
CASES = [
    pytest.param(1.0, (2, 1), id="1.0, two levels"),
    pytest.param(0.6, (0, 2), id="0.6, one level", marks=pytest.mark.slow),
    pytest.param(0.6, (2, 1), id="0.6, two levels", marks=pytest.mark.slow),
    pytest.param(1.0, (0, 2), id="1.0, one level", marks=pytest.mark.slow),
]


@pytest.mark.ci
@pytest.mark.parametrize("count", [4000, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("temperature", "lookaheads"), CASES)
def test_samples_follow_the_edited_distribution(
    tokenizer: Path, temperature: float, lookaheads: tuple[int, int], count: int
) -> None:
    params = sampling(temperature)
    probabilities = expected(params)
    drawn = samples(tokenizer, params, lookaheads, count)
    fit = p_value(drawn, probabilities)
    print(f"\nchi-square over {sum(p > 0 for p in probabilities.values())} sequences, n = {count}: p = {fit:.3f}")
    assert fit > LIKELY


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_the_published_inner_correction_fails_it(temperature: float) -> None:
    """The first token is drawn by classical speculative sampling over the three edited distributions of these
    models.
    """
    params, rng = sampling(temperature), random.Random(0)
    target, middle, draft = (
        tuple(distribution(plain_logits(model, PROMPT)[-1], (), params))
        for model in (THEIRS, with_noise(THEIRS, 0.3), with_noise(THEIRS, 0.6))
    )
    fits = [
        p_value(
            [(hierarchical(target, middle, draft, defect=defect, rng=rng),) for _ in range(20_000)],
            {(token,): p for token, p in enumerate(target)},
        )
        for defect in (False, True)
    ]
    print(f"\nresidual: p = {fits[0]:.3f}; defect: p = {fits[1]:.1e}")
    assert fits[0] > LIKELY
    assert fits[1] < IMPOSSIBLE


@pytest.mark.ci
@pytest.mark.parametrize(("temperature", "lookaheads"), CASES)
def test_noise_of_a_position_too_early_fails_it(
    tokenizer: Path, temperature: float, lookaheads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verifier draws each token with the noise of the token before it."""
    own: Callable[[Drawer, LogitsOf], list[Draw]] = Drawer._draws

    def early(drawer: Drawer, logits: LogitsOf) -> list[Draw]:
        return [Draw(draw.sampling, draw.seed, max(draw.position - 1, len(PROMPT))) for draw in own(drawer, logits)]

    monkeypatch.setattr(Drawer, "_draws", early)
    params = sampling(temperature)
    assert p_value(samples(tokenizer, params, lookaheads, 2000), expected(params)) < IMPOSSIBLE
