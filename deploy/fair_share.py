"""Fairness between API keys: no key takes all places while others want some."""

import time
from collections import Counter

from deploy.errors import OverloadedError

WANTED_S = 10.0  # a key that was refused counts as wanting places for so long; its clients try again after 1 s


class FairShare:
    """The places that each key's requests hold, from admission to their end, waiting included.

    A key may hold all places while it is alone. While other keys hold some, or found none free a moment ago, it may
    hold its share: the number of places divided by the number of these keys, itself included. Places that it held
    before stay with it until its requests end.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.held = Counter[str]()  # by the name of the key
        self.refused_at: dict[str, float] = {}

    def refused(self, key: str, count: int) -> None:
        """Note that there were no `count` free places for a request of this key, which now counts as wanting places.
        Raises `OverloadedError` instead if `count` is more than its share, because its share would not be enough.
        """
        self._share(key, count)
        self.refused_at[key] = time.monotonic()

    def take(self, key: str, count: int) -> None:
        """Hold `count` places for the key until `give_back`. Raises `OverloadedError`."""
        share, shared = self._share(key, count)
        if self.held[key] + count > share:
            raise OverloadedError(f"{shared}, and this one holds {self.held[key]} of its {share}; try again later")
        self.held[key] += count

    def _share(self, key: str, count: int) -> tuple[int, str]:
        """The key's share, and a text about the sharing. Raises `OverloadedError` if `count` places are more."""
        now = time.monotonic()
        self.refused_at = {name: at for name, at in self.refused_at.items() if now - at < WANTED_S}
        keys = {key, *self.held, *self.refused_at}
        share = max(1, self.room // len(keys))
        shared = f"{self.room} places are shared by {len(keys)} API keys"
        if count > share:
            raise OverloadedError(f"{shared}, and this request needs {count}, more than a share of {share}")
        return share, shared

    def give_back(self, key: str, count: int) -> None:
        self.held[key] -= count
        if not self.held[key]:
            del self.held[key]
