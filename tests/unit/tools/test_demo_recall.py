"""Recall tasks: answerable from the sequence itself, scored by their value tokens and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from triforce_tools.demo_training.evaluate import EvaluationPlan, answer_runs, recall_accuracy

from triforce_core.demo import weights_dir
from triforce_tools.demo_training.corpus import Corpus
from triforce_tools.demo_training.recall import RecallTasks, recall_once_sequence, recall_probe, recall_sequence
from triforce_tools.demo_training.settings import load_settings

SETTINGS = load_settings()
TOKENIZER = Tokenizer.from_file(str(weights_dir("target") / "tokenizer.json"))
TASKS = RecallTasks(TOKENIZER)
FILLER = np.array(TOKENIZER.encode("for line in lines:\n    total += len(line)\n" * 400).ids, dtype=np.uint16)
CORPUS = Corpus(train=FILLER, held_out=FILLER, documents=(), packages=(), digest="")
PLAN = EvaluationPlan(probes=2, questions=4, distractors=4)


@pytest.mark.parametrize("seed", range(5))
def test_a_question_is_answered_by_its_definition(seed: int) -> None:
    for task in TASKS.tasks(np.random.default_rng(seed), 20):
        values = [TOKENIZER.decode(s.ids[s.is_value].tolist()).strip() for s in (task.definition, task.question)]
        assert values[0] == values[1] != ""
        assert not task.question.is_value[:3].any()


@pytest.mark.parametrize("seed", range(8))
def test_a_sequence_has_its_length_and_weighs_only_text_and_answers(seed: int) -> None:
    sequence = recall_sequence(np.random.default_rng(seed), TASKS, FILLER[:513], SETTINGS.recall, answer_weight=3.0)
    assert len(sequence.ids) == len(sequence.weights) == len(sequence.is_answer) == 513
    assert sequence.is_answer.any()
    assert (sequence.weights[sequence.is_answer] == 3.0).all()
    assert set(sequence.weights[~sequence.is_answer]) <= {0.0, 1.0}


def test_every_answer_stood_in_the_sequence_before() -> None:
    sequence = recall_sequence(np.random.default_rng(3), TASKS, FILLER[:1025], SETTINGS.recall, answer_weight=3.0)
    for answer in answer_runs(sequence.is_answer):
        value = TOKENIZER.decode(sequence.ids[answer].tolist()).strip()
        assert value in TOKENIZER.decode(sequence.ids[: answer.start].tolist())


@pytest.mark.parametrize("seed", range(4))
def test_what_is_asked_once_stands_nowhere_nearer_than_its_definition(seed: int) -> None:
    filler = FILLER[:4097]
    sequence = recall_once_sequence(np.random.default_rng(seed), TASKS, filler, SETTINGS.recall, answer_weight=3.0)
    assert len(sequence.ids) == len(filler)
    assert (sequence.weights[sequence.is_answer] == 3.0).all()
    text, answers = TOKENIZER.decode(sequence.ids.tolist()), answer_runs(sequence.is_answer)
    assert 9 <= len(answers) <= 36
    values = [TOKENIZER.decode(sequence.ids[answer].tolist()).strip() for answer in answers]
    numbers = [v for v in values if v.isdigit() and sum(v in other for other in values) == 1]  # words occur by chance
    assert len(numbers) > 3
    assert all(text.count(number) == 2 for number in numbers)


@pytest.mark.parametrize("distance", [256, 1024])
def test_a_probe_asks_at_its_distance(distance: int) -> None:
    probe = recall_probe(np.random.default_rng(1), TASKS, FILLER, distance, questions=4, distractors=4)
    text, answers = TOKENIZER.decode(probe.ids.tolist()), answer_runs(probe.is_answer)
    assert len(answers) == 4
    for answer in answers:
        ids = probe.ids.tolist()
        value = TOKENIZER.decode(ids[answer]).strip()
        assert text.index(value) < len(text) / 3
        before = next(n for n in range(answer.start) if value in TOKENIZER.decode(ids[: n + 1]))
        assert abs(answer.stop - 1 - before - distance) < 32


def oracle(error_at: int | None) -> Any:
    """A stand-in for a model that knows every next token, but for the one at `error_at` among the answers' tokens."""

    def call(ids: torch.Tensor, *, use_cache: bool, logits_to_keep: int) -> SimpleNamespace:
        right = torch.cat([ids[0, 1:], ids[0, :1]])[-logits_to_keep:].clone()
        if error_at is not None:
            right[error_at] += 1
        return SimpleNamespace(logits=torch.nn.functional.one_hot(right, 4097)[None].float())

    call.device = torch.device("cpu")  # type: ignore[attr-defined]
    return call


@pytest.mark.parametrize(("error_at", "expected"), [(None, 1.0), (0, 6 / 8)])
def test_a_question_counts_only_when_its_whole_value_is_right(error_at: int | None, expected: float) -> None:
    plan = EvaluationPlan(probes=2, questions=4, distractors=4)
    assert recall_accuracy(oracle(error_at), TASKS, CORPUS, plan, distance=256, seed=1) == expected
