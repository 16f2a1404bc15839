"""Synthetic recall tasks: keys are defined early and asked for later, so only a model that looks back can answer.

A task is text such as `river_lamp = "4071"` … `assert river_lamp == "4071"`. The value cannot be guessed, so an answer
is plainly right or wrong. Sequences hold many keys (each a distractor for the others) and many questions, so a few
million tokens suffice to learn the task (after Arora et al. 2023, "Zoology", multi-query associative recall).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from triforce_tools.demo_training.corpus import Tokens
from triforce_tools.demo_training.settings import RecallSettings

# (definition, question): the text of a question before its value is the prompt.
TEMPLATES = (
    ('\n{key} = "{value}"', '\nassert {key} == "{value}"'),
    ('\n    "{key}": "{value}",', '\n    check("{key}", "{value}"'),
    ("\n# {key} is {value}", "\n# {key} is {value}"),
    ('\ndef {key}(): return "{value}"', '\n{key}()  # "{value}"'),
    ("\nself.{key} = {value}", "\nself.{key} == {value}"),
)


@dataclass(frozen=True, slots=True)
class Snippet:
    """Token ids of a definition or a question, and a mask of those that spell the value."""

    ids: Tokens  # [tokens]
    is_value: npt.NDArray[np.bool_]  # [tokens]


@dataclass(frozen=True, slots=True)
class Task:
    """One key with its definition and its question."""

    definition: Snippet
    question: Snippet


@dataclass(frozen=True, slots=True)
class RecallSequence:
    """One training or test sequence with recall tasks in it."""

    ids: Tokens  # [length]
    weights: npt.NDArray[np.float32]  # [length]; loss weight of predicting each token
    is_answer: npt.NDArray[np.bool_]  # [length]; value tokens of questions


class RecallTasks:
    """Makes tasks from the words of a vocabulary; everything random comes from the generator that is passed in."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = sorted(word for word in tokenizer.get_vocab() if re.fullmatch("[a-z]{3,8}", word))
        self.dtype: npt.DTypeLike = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32

    @classmethod
    def from_file(cls, path: Path) -> RecallTasks:
        return cls(Tokenizer.from_file(str(path)))

    def tasks(self, rng: np.random.Generator, count: int) -> list[Task]:
        """`count` tasks with different keys; some share their first word, so matching half of a key misleads."""
        words = [self._words[index] for index in rng.choice(len(self._words), size=2 * count, replace=False)]
        texts: list[tuple[str, str]] = []
        for index in range(count):
            first = words[2 * int(rng.integers(index + 1))] if rng.random() < 0.3 else words[2 * index]
            key, value = f"{first}_{words[2 * index + 1]}", self._value(rng)
            definition, question = TEMPLATES[int(rng.integers(len(TEMPLATES)))]
            texts += [(definition.format(key=key, value=value), value), (question.format(key=key, value=value), value)]
        snippets = self._encode(texts)
        return [Task(*pair) for pair in zip(snippets[::2], snippets[1::2], strict=True)]

    def _value(self, rng: np.random.Generator) -> str:
        if rng.random() < 0.5:
            return str(rng.integers(100, 100_000))
        return "_".join(self._words[index] for index in rng.integers(len(self._words), size=int(rng.integers(1, 3))))

    def _encode(self, texts: list[tuple[str, str]]) -> list[Snippet]:
        snippets = []
        encodings = self._tokenizer.encode_batch([text for text, _ in texts], add_special_tokens=False)
        for (text, value), encoding in zip(texts, encodings, strict=True):
            start = text.rindex(value)
            stop = start + len(value)
            is_value = np.array([a < stop and b > start and text[a:b] != '"' for a, b in encoding.offsets], dtype=bool)
            snippets.append(Snippet(np.array(encoding.ids, dtype=self.dtype), is_value))
        return snippets


def recall_sequence(
    rng: np.random.Generator, tasks: RecallTasks, filler: Tokens, settings: RecallSettings, *, answer_weight: float
) -> RecallSequence:
    """A sequence of `len(filler)` tokens: definitions and questions, with or without the filler text around them."""
    length = len(filler)
    dense = rng.random() < settings.dense_share
    events = length // 12 if dense else max(2, length // settings.tokens_per_snippet)
    num_keys = int(rng.integers(2, settings.max_keys + 1))
    pool = tasks.tasks(rng, num_keys)
    parts: list[tuple[Snippet, bool]] = []
    defined: list[Task] = []
    for event in range(events):
        define = not defined or (len(defined) < num_keys and rng.random() < 1.0 - event / events)
        if define:
            defined.append(pool[len(defined)])
        task = defined[-1] if define else defined[int(rng.integers(len(defined)))]
        parts.append((task.definition if define else task.question, not define))
    return _strew(rng, parts, filler[:0] if dense else filler, length, answer_weight)


def recall_once_sequence(
    rng: np.random.Generator, tasks: RecallTasks, filler: Tokens, settings: RecallSettings, *, answer_weight: float
) -> RecallSequence:
    """As `recall_sequence` with filler text, but each key is asked for once, in random order, after all definitions.

    Where a key is asked for repeatedly, all but the first answers can be copied from the previous question, which
    teaches only the distance between two questions. Here the mean distance from definition to question is half the
    sequence.
    """
    most = max(1, len(filler) // (2 * settings.tokens_per_snippet))
    pool = tasks.tasks(rng, int(rng.integers(max(1, most // 4), most + 1)))
    asked = [pool[index] for index in rng.permutation(len(pool))]
    parts = [*((task.definition, False) for task in pool), *((task.question, True) for task in asked)]
    return _strew(rng, parts, filler, len(filler), answer_weight)


def _strew(
    rng: np.random.Generator, parts: list[tuple[Snippet, bool]], filler: Tokens, length: int, answer_weight: float
) -> RecallSequence:
    """The snippets in order at random places of the filler, cut or padded to `length`."""
    room = max(0, length - sum(len(snippet.ids) for snippet, _ in parts))
    text = filler[:room]
    places = np.sort(rng.integers(0, len(text) + 1, size=len(parts)))
    ids: list[Tokens] = []
    weights: list[npt.NDArray[np.float32]] = []
    answers: list[npt.NDArray[np.bool_]] = []
    before = 0
    for (snippet, asks), place in zip(parts, places, strict=True):
        ids += [text[before:place], snippet.ids]
        answer = snippet.is_value & asks
        weights += [np.ones(place - before, np.float32), answer.astype(np.float32) * np.float32(answer_weight)]
        answers += [np.zeros(place - before, bool), answer]
        before = int(place)
    tail = length - sum(map(len, ids))
    rest = filler[before : before + max(0, tail)]
    ids.append(rest)
    weights.append(np.ones(len(rest), np.float32))
    answers.append(np.zeros(len(rest), bool))
    short = max(0, length - sum(map(len, ids)))  # a dense sequence may be too short: pad it with ignored tokens
    return RecallSequence(
        np.concatenate([*ids, np.zeros(short, filler.dtype)])[:length],
        np.concatenate([*weights, np.zeros(short, np.float32)])[:length],
        np.concatenate([*answers, np.zeros(short, bool)])[:length],
    )


def recall_probe(
    rng: np.random.Generator, tasks: RecallTasks, filler: Tokens, distance: int, *, questions: int, distractors: int
) -> RecallSequence:
    """A test sequence: `questions` definitions, filler text with `distractors` more, then the questions in the same
    order.

    Each question is about `distance` tokens after its definition; the lengths of snippets differ by a few tokens.
    `filler` must hold `distance` tokens.
    """
    pool = tasks.tasks(rng, questions + distractors)
    asked, others = pool[:questions], pool[questions:]
    length = max(0, distance - sum(len(task.definition.ids) for task in asked))
    between = _strew(rng, [(task.definition, False) for task in others], filler, length, 1.0)
    ids = [*(task.definition.ids for task in asked), between.ids, *(task.question.ids for task in asked)]
    values = np.concatenate([task.question.is_value for task in asked])
    is_answer = np.concatenate([np.zeros(sum(map(len, ids)) - len(values), bool), values])
    return RecallSequence(np.concatenate(ids), is_answer.astype(np.float32), is_answer)
