"""The target's own text: a function of the seed, made once, whenever it was interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from triforce_tools.demo_training.generations import PROMPT, ROWS, written_by_target
from triforce_tools.demo_training.modeling import build_model

from triforce_tools.demo_training import generations
from triforce_tools.demo_training.settings import Geometry

TINY = Geometry(hidden_size=16, intermediate_size=16, layers=1, heads=1, head_dim=16, rope_theta=1e4)
CORPUS = np.arange(1, 1001, dtype=np.uint16)
NEW = 8
BATCH = ROWS * (PROMPT + NEW)


def test_interrupted_anywhere_the_text_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "NEW", NEW)
    model = build_model(TINY, max_positions=512, seed=1)
    whole = written_by_target(model, CORPUS, tmp_path / "whole", num_tokens=2 * BATCH, seed=5)
    answers: Iterator[bool] = iter([False, True])
    path = tmp_path / "halted"
    assert written_by_target(model, CORPUS, path, num_tokens=2 * BATCH, seed=5, halt=lambda: next(answers)) is None
    with path.open("ab") as file:
        file.write(b"half a batch")  # as a killed process leaves it
    resumed = written_by_target(model, CORPUS, path, num_tokens=2 * BATCH, seed=5)
    assert whole is not None
    assert resumed is not None
    assert np.array_equal(whole, resumed)
    assert len(whole) == 2 * BATCH
    first = whole[: PROMPT + NEW]
    assert (np.diff(first[:PROMPT].astype(int)) == 1).all()  # goes on from the corpus
