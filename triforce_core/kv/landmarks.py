"""The landmarks of all chunks in the pool, by slot. Sequences that share slots share their landmarks.

They are computed during prefill, so that the first cut need not read all keys of a long prompt. A cut computes those
that are missing. docs/selectors.md#what-is-kept-per-request
"""

import numpy as np
import torch
from torch import Tensor

from triforce_core.errors import require
from triforce_core.kv.base import KVGeometry
from triforce_core.kv.pinned import lock
from triforce_core.kv.ranges import Range
from triforce_core.kv.selectors import Landmark
from triforce_core.machine.memory import gib

READ_TOGETHER = 1024  # chunks whose keys are read at once, which bounds the memory of wide copies


class LandmarkPool:
    """Holds one kind of landmark, for chunks of one size. Ranges of slots begin and end at whole chunks."""

    def __init__(self, landmark: Landmark, chunk: int, geometry: KVGeometry, keys: list[Tensor]) -> None:
        """`keys`: the pool of each layer, [kv_heads, slots, head_dim]. Its landmarks are on the same device."""
        self.landmark, self.chunk = landmark, chunk
        kind = example(landmark, chunk, geometry)
        count = keys[0].shape[1] // chunk
        # Per layer: [chunks, kv_heads, …], so that consecutive chunks are one piece of memory, which is copied to the
        # GPU at once.
        shape = (count, len(kind), *kind.shape[2:])
        on_host = sum(layer.device != geometry.device for layer in keys)
        together = torch.empty((on_host, *shape), dtype=kind.dtype)  # one piece of memory, which is pinned as a whole
        if on_host:
            status = lock(together, self)
            rule = f"cannot lock {gib(together.nbytes)} of memory, CUDA error {status}: lower target.kv_pool_tokens"
            require(status == 0, "target.offload", "host", rule)
        host = iter(together)
        self.layers = [
            torch.empty(shape, dtype=kind.dtype, device=layer.device) if layer.device == geometry.device else next(host)
            for layer in keys
        ]
        self.known = np.zeros((len(keys), count), dtype=bool)  # [layers, chunks]: if computed from the present keys

    def forget(self, ranges: list[Range]) -> None:
        """Mark the landmarks of these slots, which need not be whole chunks, as unknown: the keys there change."""
        for start, stop in ranges:
            self.known[:, start // self.chunk : -(-stop // self.chunk)] = False

    def fill(self, layer: int, keys: Tensor, ranges: list[Range]) -> None:
        """Compute the landmarks of these slots. `keys` [kv_heads, slots, head_dim] of the layer, on any device."""
        for first, last in ranges:
            assert first % self.chunk == last % self.chunk == 0, "ranges begin and end at whole chunks"
            for start in range(first, last, READ_TOGETHER * self.chunk):
                stop = min(last, start + READ_TOGETHER * self.chunk)
                own = slice(start // self.chunk, stop // self.chunk)
                found = self.landmark(keys[:, start:stop].unflatten(1, (-1, self.chunk)))
                self.layers[layer][own] = found.transpose(0, 1)
                self.known[layer, own] = True

    def read(self, layer: int, keys: Tensor, ranges: list[Range]) -> Tensor:
        """The landmarks of these slots, in order, [kv_heads, chunks, …]. Those not known yet are computed first."""
        for start, stop in ranges:
            self.fill(layer, keys, self._unknown(layer, start, stop))
        pieces = [self.layers[layer][start // self.chunk : stop // self.chunk] for start, stop in ranges]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).transpose(0, 1)

    def _unknown(self, layer: int, start: int, stop: int) -> list[Range]:
        """The slots from `start` to `stop` whose landmarks are not known."""
        known = np.concatenate(([True], self.known[layer, start // self.chunk : stop // self.chunk], [True]))
        edges = start + np.flatnonzero(known[1:] != known[:-1]) * self.chunk
        return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]


def example(landmark: Landmark, chunk: int, geometry: KVGeometry) -> Tensor:
    """The landmark of one chunk of zeros: its shape, [kv_heads, 1, …], and dtype."""
    return landmark(torch.zeros(geometry.num_kv_heads, 1, chunk, geometry.head_dim, dtype=geometry.dtype))
