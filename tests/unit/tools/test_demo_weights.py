"""Exported weights are plain transformers folders, and their figures keep the relations that they must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from triforce_tools.demo_training.acceptance import (
    BUDGETS,
    POSITIONS,
    RuleMeans,
    classical_acceptance,
    measure_acceptance,
    shared_noise_acceptance,
)
from triforce_tools.demo_training.card import write_card
from triforce_tools.demo_training.checkpoint import save_checkpoint
from triforce_tools.demo_training.evaluate import held_out_windows, loss_figures, repeated_share
from triforce_tools.demo_training.learner import Learner
from triforce_tools.demo_training.modeling import logits

from triforce_core.demo import weights_dir
from triforce_core.errors import InvalidValueError, UnavailableError
from triforce_core.messages import SamplingParams
from triforce_core.models.load import load_model
from triforce_core.sampling.draw import Draw, draw_tokens
from triforce_tools.demo_training.corpus import Corpus, Document, Package, build_corpus
from triforce_tools.demo_training.export import export_pair
from triforce_tools.demo_training.settings import MODELS, DemoSettings, Geometry, load_settings

TOKENIZER = weights_dir("target") / "tokenizer.json"
TINY = Geometry(hidden_size=32, intermediate_size=32, layers=2, heads=2, head_dim=16, rope_theta=1e4)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> DemoSettings:
    """The settings of a run whose models know nothing."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "a.py").write_text("a = 1\n")
    changes: dict[str, Any] = {"target": TINY, "drafter": TINY, "max_positions": 4096}
    settings = load_settings(cache_dir=folder, tokenizer=TOKENIZER).model_copy(update=changes)
    build_corpus(settings.corpus, TOKENIZER, settings.corpus_dir, [Package("a", "1", "MIT", folder, ("a.py",))])
    for name in MODELS:
        learner = Learner.fresh(name, settings, torch.device("cpu"))
        learner.progress.trained_context = 4096 if name == "target" else 512
        save_checkpoint(settings.run_dir, name, 1, learner.state())
    return settings


@pytest.fixture(scope="module")
def weights(settings: DemoSettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    export_pair(settings, folder)
    return folder


def test_plain_transformers_loads_them_and_writes_the_same_greedy_text(settings: DemoSettings, weights: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(weights / "target", dtype=torch.float32)
    assert loaded.config.num_key_value_heads == loaded.config.num_attention_heads
    assert loaded.config.max_position_embeddings == 4096
    tokenizer = AutoTokenizer.from_pretrained(weights / "target")
    prompt = tokenizer("import os\n", return_tensors="pt").input_ids
    output = loaded.generate(prompt, max_new_tokens=12, do_sample=False)[0]
    trained = Learner.fresh("target", settings, torch.device("cpu")).model.to(torch.bfloat16).to(torch.float32)
    ours = prompt[0]
    while len(ours) < len(output):
        with torch.inference_mode():
            scores = logits(trained, ours[None], torch.arange(len(ours))[None])
        ours = torch.cat([ours, scores[0, -1].argmax()[None]])
    assert output.tolist() == ours.tolist()


def test_without_a_checkpoint_nothing_is_exported(settings: DemoSettings, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no whole checkpoint of the target"):
        export_pair(settings.model_copy(update={"cache_dir": tmp_path}), tmp_path / "out")


def test_the_card_says_what_was_measured(weights: Path) -> None:
    figures = {"recall_by_distance": {"8192": 0.5}, "tokens_seen": 1234567}
    write_card(weights, figures)
    card = (weights / "README.md").read_text()
    assert "| recall_by_distance, 8192 | 0.500 |" in card
    assert "| tokens_seen | 1,234,567 |" in card
    assert "| a | 1 | MIT |" in card
    assert json.loads((weights / "evaluation.json").read_text()) == figures


def test_a_tier_that_sees_everything_agrees_with_the_target(weights: Path) -> None:
    target = load_model(str(weights / "target"), "target", "float32", "cpu")
    document = torch.randint(1, 4000, (min(BUDGETS) - 8,), generator=torch.Generator().manual_seed(1)).tolist()
    rates = measure_acceptance(target, target, [document])
    for tier in ("retrieval", "draft"):
        for budget in BUDGETS:
            assert rates[tier][str(budget)] == {"T0": 1.0, "T1": pytest.approx(1.0, abs=1e-5)}
    assert len(document) > POSITIONS


def distributions(seed: int, rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    p, q = 2 * torch.randn(2, rows, vocab, generator=torch.Generator().manual_seed(seed))
    q[:, 0] = -torch.inf  # a token that is excluded in one of them
    return p.softmax(-1), q.softmax(-1)


def test_the_acceptance_of_shared_noise_is_what_its_definition_gives() -> None:
    p, q = distributions(0, 5, 7)
    found = shared_noise_acceptance(p, q)
    for row in range(len(p)):
        total = 0.0
        for v in range(1, p.shape[1]):
            total += 1 / float(torch.maximum(p[row] / p[row, v], q[row] / q[row, v]).sum())
        assert float(found[row]) == pytest.approx(total, rel=1e-4)


def test_the_acceptance_of_shared_noise_is_what_draws_show() -> None:
    p, q = distributions(1, 1, 6)
    seeds = range(20_000)
    draws = [Draw(SamplingParams(), seed, 3) for seed in seeds]
    same = sum(
        a == b for a, b in zip(*(draw_tokens(d.log().expand(len(seeds), -1), draws) for d in (p, q)), strict=True)
    )
    assert same / len(seeds) == pytest.approx(float(shared_noise_acceptance(p, q)), abs=0.015)
    assert float(shared_noise_acceptance(p, q)) < float(classical_acceptance(p, q))


def test_both_rules_accept_everything_from_the_same_model(weights: Path) -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(3))
    means = RuleMeans()
    means.add(logits, logits)
    rates = means.rates()
    assert rates.pop("T0") == 1
    for by_rule in rates.values():
        assert by_rule == {"shared noise": pytest.approx(1, abs=1e-5), "rejection": pytest.approx(1, abs=1e-5)}


def test_losses_of_the_same_tokens_are_compared(weights: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(weights / "target", dtype=torch.float32)
    window = torch.randint(1, 4000, (4096,), generator=torch.Generator().manual_seed(2))
    figures = loss_figures(model, [window])
    assert list(figures["loss_by_position"]) == ["0-512", "512-1024", "1024-2048", "2048-4096"]
    assert list(figures["loss_by_context"]) == ["4096", "2048"]
    # A model that knows nothing is about as bad everywhere.
    assert all(value == pytest.approx(np.log(4096), rel=0.1) for value in figures["loss_by_position"].values())


def test_held_out_windows_are_whole_files_starts() -> None:
    tokens = np.arange(300, dtype=np.uint16)
    documents = (Document("long", 100, 300), Document("short", 0, 100))
    corpus = Corpus(train=tokens[:0], held_out=tokens, documents=documents, packages=(), digest="")
    assert [window.tolist() for window in held_out_windows(corpus, 150, 1)] == [list(range(100, 250))]
    with pytest.raises(InvalidValueError, match="only 1 are that long"):
        held_out_windows(corpus, 150, 2)


@pytest.mark.parametrize(("period", "expected"), [(1, 112 / 113), (16, 97 / 113), (200, 0.0)])
def test_a_loop_is_a_repetition(period: int, expected: float) -> None:
    class Loop:
        device = torch.device("cpu")

        def generate(self, prompt: torch.Tensor, *, max_new_tokens: int, do_sample: bool) -> torch.Tensor:
            return torch.cat([prompt, (torch.arange(max_new_tokens) % period)[None]], dim=1)

    share = repeated_share(Loop(), [torch.zeros(10, dtype=torch.int64)], 128)  # type: ignore[arg-type]
    assert share == pytest.approx(expected)
