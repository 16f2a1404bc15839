"""Synthetic recall tasks: keys are defined early and asked for later, so only a model that looks back can answer.

A task is text such as `river_lamp = "4071"` … `assert river_lamp == "4071"`. The value cannot be guessed, so an answer
is plainly right or wrong. Sequences hold many keys (each a distractor for the others) and many questions, so a few
million tokens suffice to learn the task (after Arora et al. 2023, "Zoology", multi-query associative recall).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from triforce_tools.demo_training.corpus import Tokens

# (definition, question): the text of a question before its value is the prompt.
TEMPLATES = (
    ('\n{key} = "{value}"', '\nassert {key} == "{value}"'),
    ('\n    "{key}": "{value}",', '\n    check("{key}", "{value}"'),
    ("\n# {key} is {value}", "\n# {key} is {value}"),
    ('\ndef {key}(): return "{value}"', '\n{key}()  # "{value}"'),
    ("\nself.{key} = {value}", "\nself.{key} == {value}"),
)
_DENSE_SHARE = 0.5  # of recall sequences without filler text between the snippets
_TOKENS_PER_SNIPPET = 56  # mean tokens between two snippets in filler text
_MAX_KEYS = 24


class Snippet(NamedTuple):
    """Token ids of a definition or a question, and a mask of those that spell the value."""

    ids: Tokens  # [tokens]
    is_value: npt.NDArray[np.bool_]  # [tokens]


class Task(NamedTuple):
    """One key with its definition and its question."""

    definition: Snippet
    question: Snippet


class RecallSequence(NamedTuple):
    """One sequence with recall tasks in it."""

    ids: Tokens  # [length]
    is_text: npt.NDArray[np.bool_]  # [length]; tokens of the filler text
    is_answer: npt.NDArray[np.bool_]  # [length]; value tokens of questions


class RecallTasks:
    """Makes tasks from the words of a vocabulary; everything random comes from the generator that is passed in."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = sorted(word for word in tokenizer.get_vocab() if re.fullmatch("[a-z]{3,8}", word))
        self.dtype: npt.DTypeLike = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32

    def tasks(self, rng: np.random.Generator, count: int) -> list[Task]:
        """`count` tasks with different keys; some share their first word, so matching half of a key misleads."""
        words = [self._words[index] for index in rng.choice(len(self._words), size=2 * count, replace=False)]
        tasks = []
        for index in range(count):
            first = words[2 * int(rng.integers(index + 1))] if rng.random() < 0.3 else words[2 * index]
            key, value = f"{first}_{words[2 * index + 1]}", self._value(rng)
            template = TEMPLATES[int(rng.integers(len(TEMPLATES)))]
            tasks.append(Task(*(self._snippet(part.format(key=key, value=value), value) for part in template)))
        return tasks

    def _value(self, rng: np.random.Generator) -> str:
        if rng.random() < 0.5:
            return str(rng.integers(100, 100_000))
        return "_".join(self._words[index] for index in rng.integers(len(self._words), size=int(rng.integers(1, 3))))

    def _snippet(self, text: str, value: str) -> Snippet:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        start = text.rindex(value)
        stop = start + len(value)
        is_value = [a < stop and b > start and text[a:b] != '"' for a, b in encoding.offsets]
        return Snippet(np.array(encoding.ids, dtype=self.dtype), np.array(is_value, dtype=bool))


def recall_sequence(rng: np.random.Generator, tasks: RecallTasks, filler: Tokens) -> RecallSequence:
    """A sequence of `len(filler)` tokens: definitions and questions, with or without the filler text around them."""
    length = len(filler)
    dense = rng.random() < _DENSE_SHARE
    events = length // 12 if dense else max(2, length // _TOKENS_PER_SNIPPET)
    pool = tasks.tasks(rng, int(rng.integers(2, _MAX_KEYS + 1)))
    parts: list[tuple[Snippet, bool]] = []
    num_defined = 0
    for event in range(events):
        if num_defined == 0 or (num_defined < len(pool) and rng.random() < 1.0 - event / events):
            parts.append((pool[num_defined].definition, False))
            num_defined += 1
        else:
            parts.append((pool[int(rng.integers(num_defined))].question, True))
    return _strew(rng, parts, filler[:0] if dense else filler, length)


def recall_once_sequence(rng: np.random.Generator, tasks: RecallTasks, filler: Tokens) -> RecallSequence:
    """As `recall_sequence` with filler text, but each key is asked for once, in random order, after all definitions.

    Where a key is asked for repeatedly, all but the first answers can be copied from the previous question, which
    teaches only the distance between two questions. Here the mean distance from definition to question is half the
    sequence.
    """
    most = max(1, len(filler) // (2 * _TOKENS_PER_SNIPPET))
    pool = tasks.tasks(rng, int(rng.integers(max(1, most // 4), most + 1)))
    asked = [pool[index] for index in rng.permutation(len(pool))]
    parts = [*((task.definition, False) for task in pool), *((task.question, True) for task in asked)]
    return _strew(rng, parts, filler, len(filler))


def _strew(rng: np.random.Generator, parts: list[tuple[Snippet, bool]], filler: Tokens, length: int) -> RecallSequence:
    """The snippets in order at random places of the filler, cut or padded with zeros to `length`; a part says whether
    it asks.
    """
    text = filler[: max(0, length - sum(len(snippet.ids) for snippet, _ in parts))]
    gaps = np.split(text, np.sort(rng.integers(0, len(text) + 1, size=len(parts))))
    pieces = [_piece(gaps[0], is_text=True)]
    for (snippet, asks), gap in zip(parts, gaps[1:], strict=True):
        pieces += [_piece(snippet.ids, is_answer=snippet.is_value & asks), _piece(gap, is_text=True)]
    pieces.append(_piece(np.zeros(length, filler.dtype)))
    return RecallSequence(*(np.concatenate(column)[:length] for column in zip(*pieces, strict=True)))


def _piece(ids: Tokens, *, is_text: bool = False, is_answer: Any = False) -> RecallSequence:
    return RecallSequence(ids, np.full(len(ids), is_text), np.full(len(ids), is_answer))
