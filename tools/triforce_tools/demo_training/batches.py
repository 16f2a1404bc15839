"""The sequences of a step: a pure function of (seed, stage, step), so resuming changes nothing."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from triforce_tools.demo_training.corpus import Tokens
from triforce_tools.demo_training.recall import RecallTasks, recall_once_sequence, recall_sequence
from triforce_tools.demo_training.settings import DemoSettings, Stage


class Batch(NamedTuple):
    """Sequences of one step; position t predicts `labels[:, t]`."""

    ids: Tensor  # [rows, length] int64
    labels: Tensor  # [rows, length] int64
    positions: Tensor  # [rows, length] int64
    weights: Tensor  # [rows, length] float32; loss weight of the label


def make_batch(settings: DemoSettings, stage: Stage, tokens: Tokens, tasks: RecallTasks, step: int) -> Batch:
    """The batch of a step, counted from the stage's start."""
    numbers = range(step * stage.rows, (step + 1) * stage.rows)
    rows = [_row(settings, stage, tokens, tasks, number) for number in numbers]
    ids, positions, weights = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
    return Batch(ids[:, :-1], ids[:, 1:], positions[:, :-1], weights[:, 1:])


def _row(
    settings: DemoSettings, stage: Stage, tokens: Tokens, tasks: RecallTasks, number: int
) -> tuple[npt.NDArray[np.generic], ...]:
    """Token ids, positions and weights of the sequence with this number, counted from the stage's start."""
    length, seed = stage.length + 1, (settings.seed, zlib.crc32(stage.name.encode()))
    rng = np.random.default_rng((*seed, 1, number))
    ids, weights = _window(seed, tokens, length, number), np.ones(length, np.float32)
    if rng.random() < stage.recall_share:
        once = stage.once_share > 0 and rng.random() < stage.once_share
        sequence = (recall_once_sequence if once else recall_sequence)(rng, tasks, ids)
        ids = sequence.ids
        weights = (sequence.is_text + stage.answer_weight * sequence.is_answer).astype(np.float32)
    positions = np.arange(length, dtype=np.int64)
    if rng.random() < stage.skip_share:
        positions += _skips(rng, length, settings.max_positions)
    return ids.astype(np.int64), positions, weights


def _window(seed: tuple[int, int], tokens: Tokens, length: int, number: int) -> Tokens:
    """Window `number` of the text in an order that shows each window once per epoch."""
    windows = max(1, (len(tokens) - 1) // length - 1)
    epoch, index = divmod(number, windows)
    shift = int(np.random.default_rng((*seed, 2, epoch)).integers(length))
    start = shift + int(_order((*seed, 0, epoch), windows)[index]) * length
    return tokens[start : start + length]


@lru_cache(maxsize=1)
def _order(seed: tuple[int, ...], windows: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(windows)


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
