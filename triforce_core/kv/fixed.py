"""Caches in which every sequence owns the same number of slots."""

from __future__ import annotations

from triforce_core.attention import Kernel
from triforce_core.kv.base import KVCache, KVGeometry
from triforce_core.messages import SequenceSpec


class FixedKV(KVCache):
    """Memory and attention cost are bounded by `slots_each` a sequence, whatever its length.

    A sequence's slots are one range: the pool is handed out in portions of one size, so that it never fragments.
    """

    def __init__(self, geometry: KVGeometry, max_sequences: int, slots_each: int, kernel: Kernel) -> None:
        super().__init__(geometry, max_sequences * slots_each, kernel)
        self.slots_each = slots_each

    def slots_for(self, spec: SequenceSpec) -> int:
        return self.slots_each
