"""Selectors, one per file: how the chunks of the full cache are ranked for a snapshot. docs/selectors.md compares them.

A new one is a file here, an entry of `SELECTORS`, and its name in `SelectorName` (triforce_core/config.py).
"""

from collections.abc import Callable
from functools import partial

from triforce_core.kv.selectors.base import Chunks, Landmark, Selector, grouped
from triforce_core.kv.selectors.h2o import H2O
from triforce_core.kv.selectors.mean_key import MeanKey
from triforce_core.kv.selectors.quest import Quest
from triforce_core.kv.selectors.snapkv import SnapKV
from triforce_core.kv.selectors.streaming import Streaming

RECENT = 8  # queries; the mean of more finds less of what stands far back

SELECTORS: dict[str, Callable[[], Selector]] = {
    "mean_key": MeanKey,
    "mean_key_recent": partial(MeanKey, RECENT),
    "quest": Quest,
    "snapkv": SnapKV,
    "h2o": H2O,
    "streaming": Streaming,
}

__all__ = ["H2O", "SELECTORS", "Chunks", "Landmark", "MeanKey", "Quest", "Selector", "SnapKV", "Streaming", "grouped"]
