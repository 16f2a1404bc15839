"""The order of the data: a batch is a pure function of (seed, stage, step), so resuming changes nothing."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from triforce_tools.demo_training.corpus import Tokens
from triforce_tools.demo_training.recall import RecallTasks, recall_once_sequence, recall_sequence
from triforce_tools.demo_training.settings import DemoSettings, Stage


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one step; position t predicts `labels[:, t]`."""

    ids: Tensor  # [rows, length] int64
    labels: Tensor  # [rows, length] int64
    positions: Tensor  # [rows, length] int64
    weights: Tensor  # [rows, length] float32; loss weight of the label
    is_answer: Tensor  # [rows, length] bool; whether the label is part of the answer to a recall question


class BatchSource:
    """Batches of one stage."""

    def __init__(self, settings: DemoSettings, stage: Stage, tokens: Tokens, tasks: RecallTasks) -> None:
        self._settings, self._stage, self._tokens, self._tasks = settings, stage, tokens, tasks
        self._seed = (settings.seed, zlib.crc32(stage.name.encode()))
        self._windows = max(1, (len(tokens) - 1) // (stage.length + 1) - 1)
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None  # the latest epoch and its order of windows

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from the stage's start."""
        rows = [self._row(step * self._stage.rows + row) for row in range(self._stage.rows)]
        ids, positions, weights, answers = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
        return Batch(ids[:, :-1], ids[:, 1:], positions[:, :-1], weights[:, 1:], answers[:, 1:])

    def _row(self, number: int) -> tuple[npt.NDArray[np.generic], ...]:
        length = self._stage.length + 1
        rng = np.random.default_rng((*self._seed, 1, number))
        text = self._window(number, length)
        weights, answers = np.ones(length, np.float32), np.zeros(length, bool)
        if rng.random() < self._stage.recall_share:
            once = self._stage.once_share > 0 and rng.random() < self._stage.once_share
            make = recall_once_sequence if once else recall_sequence
            sequence = make(rng, self._tasks, text, self._settings.recall, answer_weight=self._stage.answer_weight)
            text, weights, answers = sequence.ids, sequence.weights, sequence.is_answer
        positions = np.arange(length, dtype=np.int64)
        if rng.random() < self._stage.skip_share:
            positions += _skips(rng, length, self._settings.max_positions)
        return text.astype(np.int64), positions, weights, answers

    def _window(self, number: int, length: int) -> Tokens:
        """Window `number` in an order that shows each window of the corpus once per epoch."""
        epoch, index = divmod(number, self._windows)
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng((*self._seed, 0, epoch)).permutation(self._windows)
            self._order = (epoch, order)
        shift = int(np.random.default_rng((*self._seed, 2, epoch)).integers(length))
        start = shift + int(self._order[1][index]) * length
        return self._tokens[start : start + length]


def _skips(rng: np.random.Generator, length: int, max_positions: int) -> npt.NDArray[np.int64]:
    """Offsets that make the positions of a sequence jump at up to three places, [length].

    They teach distances longer than the sequence (Zhu et al. 2023, "PoSE").
    """
    jumps = np.zeros(length, dtype=np.int64)
    places = rng.integers(1, length, size=int(rng.integers(1, 4)))
    total = int(np.exp(rng.uniform(np.log(64), np.log(max(65, max_positions - length)))))
    for place, part in zip(places, rng.multinomial(total, np.full(len(places), 1 / len(places))), strict=True):
        jumps[place] += part
    return np.minimum(np.cumsum(jumps), max_positions - length)
