"""Caches in which every sequence owns the same number of slots."""

from triforce_core.attention import Kernel
from triforce_core.kv.base import KVCache, KVGeometry
from triforce_core.messages import SequenceSpec


class FixedKV(KVCache):
    """Each sequence owns `slots_each` slots, which bounds its memory and attention cost at any length.

    The slots of a sequence are one range. As all ranges have the same size, the pool never fragments.
    """

    def __init__(self, geometry: KVGeometry, max_sequences: int, slots_each: int, kernel: Kernel) -> None:
        super().__init__(geometry, max_sequences * slots_each, kernel)
        self.slots_each = slots_each

    def slots_for(self, spec: SequenceSpec) -> int:
        return self.slots_each
