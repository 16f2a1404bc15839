"""The kernel in Triton as far as it goes without a GPU: in Triton's interpreter, which computes with NumPy.

pip install triton && TRITON_INTERPRET=1 python -m pytest tests/unit/core/attention/test_flash_decoding.py
"""

from __future__ import annotations

import os
import random
from importlib.util import find_spec

import pytest
import torch

from tests.unit.core.attention.test_ranged import work_items
from triforce_core.attention import flash_decoding as ours
from triforce_core.attention import ranged_for, trial
from triforce_core.attention.base import Partial
from triforce_core.attention.ranged import gathered, over_items
from triforce_core.config import Settings

# Triton asks for the variable as it is imported. In float16: NumPy has no bfloat16.
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None,
    reason="needs Triton and its interpreter, see above",
)


PIECES = [(700, 600), (0, 0), (5, 1), (9, 0), (20, 257), (400, 31)]


def pool_of(kv_heads: int, head_dim: int) -> torch.Tensor:
    """Keys and values of which all outside of the pieces is NaN."""
    pool = torch.full((2, kv_heads, 1400, head_dim), torch.nan, dtype=torch.float16)
    for start, length in PIECES:
        pool[:, :, start : start + length] = torch.randn(2, kv_heads, length, head_dim)
    return pool


def close(found: Partial, expected: Partial) -> None:
    torch.testing.assert_close(found.output.float(), expected.output, atol=2e-3, rtol=0)
    torch.testing.assert_close(found.lse, expected.lse, atol=1e-4, rtol=0)


def exact(query: torch.Tensor, pool: torch.Tensor, scale: float) -> Partial:
    """The attention of each item's queries [items, rows, kv_heads, head_dim] to its piece of the pool, in float64."""
    outputs, lses = [], []
    for own, (start, length) in zip(query.double().transpose(1, 2), PIECES, strict=True):
        keys, values = pool[:, :, start : start + length].double()
        logits = own @ keys.mT * scale
        outputs.append((logits.softmax(-1) @ values).transpose(0, 1))
        lses.append(logits.logsumexp(-1))
    return Partial(torch.stack(outputs).float(), torch.stack(lses, dim=1).float())


DRAW = random.Random(7)


@interpreted
@pytest.mark.parametrize(
    ("queries", "kv_heads", "head_dim"),
    [(1, 2, 64), (9, 8, 16), (20, 1, 96), (70, 2, 128)]
    + [(DRAW.randint(1, 80), DRAW.randint(1, 5), DRAW.choice([8, 16, 40, 64, 80, 128, 256])) for _ in range(16)],
)
def test_it_is_the_attention_over_ranges(
    queries: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged ranges in any order and empty ones; widths that are no power of two; more queries than a tile has. Every
    result is written.
    """
    empty = ours.results
    monkeypatch.setattr(ours, "results", lambda *given: tuple(each.fill_(torch.nan) for each in empty(*given)))
    pool = pool_of(kv_heads, head_dim)
    query, items = torch.randn(len(PIECES), queries, kv_heads, head_dim).half(), work_items(PIECES, 2)
    found = ours.triton_ranged(query, pool[0], pool[1], 0.1, items)
    close(found, exact(query, pool, 0.1))


@interpreted
@pytest.mark.parametrize("sequences", [1, 3])
def test_all_items_of_a_sequence_have_its_queries(sequences: int) -> None:
    """The query of several items is one tensor, expanded."""
    pool, splits = pool_of(2, 32), len(PIECES) // sequences
    query, items = torch.randn(2, 1, sequences, 4, 32).half(), work_items(PIECES, splits)
    found = over_items(ours.triton_ranged, query, pool[0], pool[1], 0.1, items)
    close(found, over_items(gathered, query.float(), *pool.float(), 0.1, items))


@interpreted
@pytest.mark.parametrize(
    ("held", "dim", "keys"),
    [(232_448, 128, 64), (232_448, 256, 32), (166_912, 128, 64), (101_376, 128, 32), (49_152, 128, 16)],
)
def test_a_tile_fits_the_shared_memory(held: int, dim: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an H100, an A100, an RTX 4090, and one that has less."""
    from triton.runtime import driver

    class Utils:
        @staticmethod
        def get_device_properties(index: int) -> dict[str, int]:
            assert index == 1
            return {"max_shared_mem": held}

    class Active:
        utils = Utils

    monkeypatch.setattr(type(driver), "active", Active)
    ours.keys_of_tile.cache_clear()
    assert ours.keys_of_tile(64 if dim == 256 else 16, dim, torch.device("cuda", 1)) == keys


@pytest.mark.parametrize("runs", [True, False])
def test_keys_are_copied_where_triton_cannot_run(runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triforce_core.attention.can_run", lambda device: runs)
    settings = Settings.model_validate({"device": "cuda", "dtype": "bfloat16"})
    assert ranged_for(settings) is (ours.triton_ranged if runs else gathered)
    assert ranged_for(settings.model_copy(update={"dtype": "float32"})) is gathered
    assert ranged_for(Settings()) is gathered


@pytest.mark.parametrize("failing", ["attention", "fused"])
@pytest.mark.parametrize(
    ("installed", "lacks", "fails", "said"),
    [
        (True, None, None, None),
        (False, None, None, "Triton is not installed"),
        (True, "there is no C compiler: install gcc", None, "there is no C compiler"),
        (True, None, RuntimeError("ptxas\nno kernel image"), "RuntimeError: no kernel image"),
    ],
    ids=str,
)
def test_triton_must_be_there_and_work(
    installed: bool,
    lacks: str | None,
    fails: Exception | None,
    said: str | None,
    failing: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def kernel(*arguments: object) -> None:
        if fails:
            raise fails

    monkeypatch.setattr(trial, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(trial, "lacking", lambda device_type: lacks)
    for name in ("attention", "fused"):  # either may fail
        monkeypatch.setattr(trial, name, kernel if name == failing else lambda *arguments: None)
    assert trial.can_run.__wrapped__(torch.device("cpu")) is (said is None)
    assert (said or "") in caplog.text
    assert ("read with PyTorch's operators" in caplog.text) is (said is not None)
