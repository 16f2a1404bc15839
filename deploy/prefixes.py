"""Records which replica holds which texts, by chained keys of token blocks: a key stands for a whole prefix."""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Generic, TypeVar

BLOCK = 64  # tokens
KEY_BYTES = 8
# For this number of matched tokens, a prompt may wait behind one more request. The number is assumed, not measured.
TOKENS_PER_REQUEST = 256
MARGIN = 2  # blocks: a replica does not find the last tokens of a prompt, whose queries its selector needs
ReplicaId = TypeVar("ReplicaId", bound=Hashable)


def prefix_keys(tokens: Iterable[int], before: bytes = b"") -> bytes:
    """The keys of all whole blocks of tokens, concatenated, `KEY_BYTES` each.

    A block's key stands for all tokens up to the block's end, and for `before`: the key of the text before these
    tokens, or `salt_key` of the request.
    """
    data = array("I", tokens)
    keys = []
    for first in range(0, len(data) - BLOCK + 1, BLOCK):
        before = blake2b(before + data[first : first + BLOCK].tobytes(), digest_size=KEY_BYTES).digest()
        keys.append(before)
    return b"".join(keys)


def salt_key(cache_salt: str) -> bytes:
    """What the first key stands for besides its tokens: replicas share KV only where the salts are equal."""
    return blake2b(cache_salt.encode(), digest_size=KEY_BYTES).digest() if cache_salt else b""


@dataclass(slots=True)
class Sent:
    """A block that a replica was sent."""

    turn: int  # `PrefixIndex.turn` when this block was last used
    held: bool = False  # whether a request with this block has been answered, so that its KV is known to be there


class PrefixIndex(Generic[ReplicaId]):
    """The keys of the blocks that each replica was sent, at most `capacity` per replica.

    The keys used longest ago are forgotten first, as the replica's cache does with the KV. The last blocks of a prompt
    are forgotten before its first, so the remaining keys always form a prefix.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.sent: dict[ReplicaId, OrderedDict[bytes, Sent]] = {}
        self.turn = 0

    def add(self, replica: ReplicaId, keys: bytes) -> list[int]:
        """Note that the replica is sent a prompt.

        Returns the turns in which the prompt's first blocks were last used, as far as the replica was believed to hold
        their KV. `missed` takes them.
        """
        known = self.sent.setdefault(replica, OrderedDict())
        found = (known.get(key) for key in split(keys))
        turns = [block.turn for block in takewhile(lambda block: block is not None and block.held, found) if block]
        self._use(known, keys)
        return turns

    def hold(self, replica: ReplicaId, keys: bytes) -> None:
        """Note that the replica has read this text."""
        if (known := self.sent.get(replica)) is not None:  # the replica is not gone
            self._use(known, keys, held=True)

    def _use(self, known: OrderedDict[bytes, Sent], keys: bytes, *, held: bool = False) -> None:
        self.turn += 1
        for key in reversed([*split(keys)][: self.capacity]):
            before = known.pop(key, None)
            known[key] = Sent(self.turn, held or (before is not None and before.held))
        while len(known) > self.capacity:
            known.popitem(last=False)

    def missed(self, replica: ReplicaId, turns: list[int], matched: int) -> None:
        """Note that the replica found `matched` tokens of a prompt for which `add` returned `turns`.

        A replica drops the blocks that were used longest ago first. So if it has dropped a block, it has also dropped
        all blocks that were last used no later.
        """
        first = matched // BLOCK + MARGIN
        if first >= len(turns):
            return
        known = self.sent.get(replica, OrderedDict())
        while known and next(iter(known.values())).turn <= turns[first]:
            known.popitem(last=False)

    def match(self, replica: ReplicaId, keys: bytes) -> int:
        """How many of the prompt's first blocks the replica was sent."""
        known = self.sent.get(replica, OrderedDict())
        return next((i for i, key in enumerate(split(keys)) if key not in known), len(keys) // KEY_BYTES)

    def keep(self, replicas: Iterable[ReplicaId]) -> None:
        """Forget all other replicas, which are gone."""
        self.sent = {replica: self.sent[replica] for replica in replicas if replica in self.sent}


def split(keys: bytes) -> Iterable[bytes]:
    return (keys[first : first + KEY_BYTES] for first in range(0, len(keys), KEY_BYTES))


def preferred(
    matches: Mapping[ReplicaId, int], blocks: int, ongoing: Mapping[ReplicaId, int], busier_by: int
) -> list[ReplicaId]:
    """The replicas that a prompt should go to because of its match: the replicas that hold the most of its `blocks`,
    except replicas that are too busy for what the match saves.

    The match must be `TOKENS_PER_REQUEST` tokens and half of the prompt. For every `TOKENS_PER_REQUEST` matched tokens
    a replica may have one request more than the least busy one, but at most `busier_by` more.
    """
    best = max(matches.values(), default=0)
    worth = best * BLOCK // TOKENS_PER_REQUEST
    if not worth or 2 * best < blocks:
        return []
    most = min(ongoing.values()) + min(busier_by, worth)
    return [replica for replica, match in matches.items() if match == best and ongoing[replica] <= most]
