"""Selectors: how chunks of the full cache are ranked for a snapshot."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Selector(Protocol):
    """Ranks chunks by landmarks, which are computed once per chunk."""

    def landmarks(self, keys: Tensor) -> Tensor:
        """keys [kv_heads, chunks, chunk, head_dim] → one landmark per chunk, [kv_heads, chunks, …]."""
        ...

    def scores(self, queries: Tensor, landmarks: Tensor) -> Tensor:
        """queries [heads, rows, head_dim], the latest row last → [kv_heads, chunks] float32, higher for better."""
        ...


class MeanKey:
    """TriForce's selector: scores the last query against each chunk's mean key (Sun et al. 2024, section 4.1).

    Query heads that share a KV head share one selection: their softmaxes over the chunks are averaged, so that no head
    dominates by the scale of its scores. With one query head per KV head this ranks chunks as the paper does.
    """

    def landmarks(self, keys: Tensor) -> Tensor:
        return keys.mean(2, dtype=torch.float32).to(keys.dtype)

    def scores(self, queries: Tensor, landmarks: Tensor) -> Tensor:
        last = queries[:, -1].float().unflatten(0, (landmarks.shape[0], -1))  # [kv_heads, group, head_dim]
        scale = float(queries.shape[-1]) ** -0.5
        shares: Tensor = ((last @ landmarks.float().mT) * scale).softmax(-1)
        return shares.mean(1)


SELECTORS: dict[str, type[Selector]] = {"mean_key": MeanKey}
