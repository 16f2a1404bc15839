"""Selectors, one per file: how the chunks of the full cache are ranked for a snapshot. docs/selectors.md compares them.

A new one is a file here and an entry of `SELECTORS`; docs/extending.md has all steps.
"""

from collections.abc import Callable

from triforce_core.kv.selectors.base import Chunks, Landmark, Selector, grouped
from triforce_core.kv.selectors.h2o import H2O
from triforce_core.kv.selectors.mean_key import MeanKey, mean_keys
from triforce_core.kv.selectors.snapkv import SnapKV
from triforce_core.kv.selectors.streaming import Streaming

SELECTORS: dict[str, Callable[[], Selector]] = {
    "mean_key": MeanKey,
    "snapkv": SnapKV,
    "h2o": H2O,
    "streaming": Streaming,
}

# If the selector of the settings is one of these, the target keeps its landmarks in a pool (kv/landmarks.py).
LANDMARKS: dict[str, Landmark] = {"mean_key": mean_keys}

__all__ = [
    "H2O",
    "LANDMARKS",
    "SELECTORS",
    "Chunks",
    "Landmark",
    "MeanKey",
    "Selector",
    "SnapKV",
    "Streaming",
    "grouped",
]
