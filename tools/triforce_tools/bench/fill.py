"""KV of a long prompt without its prefill, for benchmarks: the time of a pass does not depend on its values."""

from __future__ import annotations

import torch
from torch import Tensor

from triforce_core.kv.base import Forward, KVCache
from triforce_core.kv.full import FullKV
from triforce_core.kv.landmarks import LandmarkPool
from triforce_core.kv.ranges import Range
from triforce_core.messages import Span


@torch.inference_mode()
def fill(kv: FullKV, span: Span, group: int = 1) -> None:
    """Hold KV up to the end of `span`; draw missing KV from a normal distribution.

    All heads and layers get the same values, because a CPU takes minutes to draw all values of a long context. The
    sequence must already be open, or `span` must start at 0. `group`: query heads of each KV head.
    """
    rows = KVCache.prepare(kv, [Forward(span, num_sampled=0)]).rows  # of any cache, without starting copies
    if not rows:
        return
    placed, held, geometry = rows[0].placed, kv.held[span.sequence_id], kv.geometry
    assert not held.given, "KV that others may use is not written again"
    if held.node is not None:  # nobody else may use what is drawn
        kv.tree.leave(held.node)
        held.node = None
    longest = max(stop - start for start, stop in placed.writes)
    drawn: dict[torch.device, Tensor] = {}  # by the device of a layer's pool
    for layer, pools in enumerate(zip(kv.keys, kv.values, strict=True)):
        place = pools[0].device
        if place not in drawn:
            drawn[place] = torch.empty(2, longest, geometry.head_dim, dtype=geometry.dtype, device=place).normal_()
        for start, stop in placed.writes:
            for pool, values in zip(pools, drawn[place], strict=True):
                pool[:, start:stop] = values[: stop - start]
        drawn_queries = min(len(placed.tokens), len(held.queries.positions))
        shape = group * geometry.num_kv_heads, drawn_queries, geometry.head_dim
        queries = torch.empty(shape, dtype=geometry.dtype, device=geometry.device).normal_()
        held.queries.take(layer, queries, drawn_queries)
        if layer in held.mass:
            held.mass[layer] = torch.ones(geometry.num_kv_heads, held.count_to, device=geometry.device)
    if kv.landmarks:
        fill_landmarks(kv.landmarks, kv.keys, placed.writes)


def fill_landmarks(landmarks: LandmarkPool, keys: list[Tensor], written: list[Range]) -> None:
    """Compute the landmarks of whole chunks in these slots, where all layers on a device have the same `keys`."""
    chunk, first = landmarks.chunk, dict[torch.device, int]()
    whole = [(-(-start // chunk), stop // chunk) for start, stop in written]
    ranges = [(start, stop) for start, stop in whole if start < stop]  # in chunks
    for layer, pool in enumerate(keys):
        like = first.setdefault(pool.device, layer)
        if like == layer:
            landmarks.fill(layer, pool, [(start * chunk, stop * chunk) for start, stop in ranges])
            continue
        for start, stop in ranges:
            landmarks.layers[layer][start:stop] = landmarks.layers[like][start:stop]
            landmarks.known[layer, start:stop] = True
