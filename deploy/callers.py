"""Whether the callers of a replica are alive. Serve cancels a call when its caller asks for that, which a dead caller
cannot do: the replica would go on decoding for nobody, and hold the request's KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

ASK_EVERY_S = 5.0


class Callers:
    """Cancels the calls of actors that have died."""

    def __init__(self) -> None:
        self.calls: dict[ActorHandle[Any], set[asyncio.Task[Any]]] = {}
        self.watching: dict[ActorHandle[Any], asyncio.Task[None]] = {}

    @contextmanager
    def call_of(self, caller: ActorHandle[Any]) -> Iterator[None]:
        """While this is open, the current task is cancelled if `caller` dies."""
        task = asyncio.current_task()
        assert task is not None, "called from a coroutine"
        calls = self.calls.setdefault(caller, set())
        calls.add(task)
        if caller not in self.watching:
            self.watching[caller] = asyncio.create_task(self._watch(caller), name="caller")
        try:
            yield
        finally:
            calls.discard(task)

    async def _watch(self, caller: ActorHandle[Any]) -> None:
        try:
            while self.calls[caller] and await alive(caller):
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            del self.watching[caller]
            for task in self.calls.pop(caller):
                task.cancel()


async def alive(actor: ActorHandle[Any]) -> bool:
    """False once Ray knows that the actor has died. Waits while it does not answer."""
    try:
        await actor.__ray_ready__.remote()
    except ActorDiedError:
        return False
    except RayError:
        pass  # it cannot be reached at the moment
    return True
