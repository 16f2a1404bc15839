"""Selectors, one per file: how the chunks of the full cache are ranked for a snapshot. docs/selectors.md compares them.

A new one is a file here and an entry of `SELECTORS`; docs/extending.md has all steps.
"""

from collections.abc import Callable
from functools import partial

from triforce_core.kv.selectors.base import Chunks, Landmark, Selector, grouped
from triforce_core.kv.selectors.h2o import H2O
from triforce_core.kv.selectors.mean_key import MeanKey, mean_keys
from triforce_core.kv.selectors.quest import Quest, bounds
from triforce_core.kv.selectors.snapkv import SnapKV
from triforce_core.kv.selectors.streaming import Streaming

RECENT = 8  # latest queries of `mean_key_recent`; averaging more of them finds fewer relevant chunks far back

SELECTORS: dict[str, Callable[[], Selector]] = {
    "mean_key": MeanKey,
    "mean_key_recent": partial(MeanKey, RECENT),
    "quest": Quest,
    "snapkv": SnapKV,
    "h2o": H2O,
    "streaming": Streaming,
}

# If the selector of the settings is one of these, the target keeps its landmarks in a pool (kv/landmarks.py).
LANDMARKS: dict[str, Landmark] = {"mean_key": mean_keys, "mean_key_recent": mean_keys, "quest": bounds}

__all__ = [
    "H2O",
    "LANDMARKS",
    "SELECTORS",
    "Chunks",
    "Landmark",
    "MeanKey",
    "Quest",
    "Selector",
    "SnapKV",
    "Streaming",
    "grouped",
]
