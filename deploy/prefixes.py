"""Records which replica was sent which prompts, by chained keys of token blocks: a key stands for a whole prefix."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

BLOCK = 64  # tokens
KEY_BYTES = 8
ReplicaId = TypeVar("ReplicaId", bound=Hashable)


def prefix_keys(tokens: Iterable[int]) -> bytes:
    """The keys of all whole blocks of tokens, concatenated, `KEY_BYTES` each.

    A block's key stands for all tokens up to the block's end.
    """
    data = array("I", tokens)
    keys = [b""]
    for first in range(0, len(data) - BLOCK + 1, BLOCK):
        keys.append(blake2b(keys[-1] + data[first : first + BLOCK].tobytes(), digest_size=KEY_BYTES).digest())
    return b"".join(keys)


class PrefixIndex(Generic[ReplicaId]):
    """The keys of the blocks that each replica was sent, at most `capacity` per replica.

    The keys sent longest ago are forgotten first. The last blocks of a prompt are forgotten before its first, so the
    remaining keys always form a prefix.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sent: dict[ReplicaId, OrderedDict[bytes, None]] = {}

    def add(self, replica: ReplicaId, keys: bytes) -> None:
        known = self.sent.setdefault(replica, OrderedDict())
        for key in reversed(list(split(keys))[: self.capacity]):
            known[key] = None
            known.move_to_end(key)
        while len(known) > self.capacity:
            known.popitem(last=False)

    def match(self, replica: ReplicaId, keys: bytes) -> int:
        """How many of the prompt's first blocks the replica was sent."""
        known = self.sent.get(replica, OrderedDict())
        return next((i for i, key in enumerate(split(keys)) if key not in known), len(keys) // KEY_BYTES)

    def holders(self, replicas: Iterable[ReplicaId], keys: bytes) -> list[ReplicaId]:
        """The replicas that were sent the most of the prompt's first blocks; empty if none was sent any."""
        matches = {replica: self.match(replica, keys) for replica in replicas}
        best = max(matches.values(), default=0)
        return [replica for replica, match in matches.items() if match == best] if best else []

    def keep(self, replicas: Iterable[ReplicaId]) -> None:
        """Forget all other replicas, which are gone."""
        self.sent = {replica: self.sent[replica] for replica in replicas if replica in self.sent}


def split(keys: bytes) -> Iterable[bytes]:
    return (keys[first : first + KEY_BYTES] for first in range(0, len(keys), KEY_BYTES))


def preferred(holders: Sequence[ReplicaId], ongoing: dict[ReplicaId, int], busier_by: int) -> list[ReplicaId]:
    """The holders that have at most `busier_by` requests more than the least busy of all replicas."""
    least = min(ongoing.values(), default=0)
    return [replica for replica in holders if ongoing[replica] - least <= busier_by]
