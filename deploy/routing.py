"""Routes a request to the replica that holds most of its prefix, unless that replica is too busy for what this saves.

The gateway's process sends all requests, so it knows what each replica was sent without asking the replicas. Answers
tell what a replica found of it.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deploy.circuit_breaker import NONE, Avoid
from deploy.prefixes import BLOCK, KEY_BYTES, PrefixIndex, preferred, prefix_keys, salt_key


class Route:
    """What the router is told of a request in the keyword `route`, and what it then learns from the answer.

    The router notes here where the request went. With a route without a prompt, the request goes to any replica, and
    nothing is learned from the answer. The replica itself gets such an empty route, because it has no use for it.
    """

    def __init__(self, prompt: Sequence[int] = (), cache_salt: str = "") -> None:
        self.keys = prefix_keys(prompt, salt_key(cache_salt))
        self.open = [*prompt[len(prompt) // BLOCK * BLOCK :]]  # tokens after the last whole block
        self.index: PrefixIndex[ReplicaID] | None = None
        self.replica: ReplicaID  # the one that `index` has noted for this request
        self.turns: list[int] = []

    def __reduce__(self) -> tuple[type[Route], tuple[()]]:
        return Route, ()

    def taken(self, replica: ReplicaID, index: PrefixIndex[ReplicaID]) -> None:
        """The request goes to this replica."""
        if self.index is not None and self.replica == replica:
            return  # the index knows
        self.replica, self.index, self.turns = replica, index, index.add(replica, self.keys)

    def answered(self, found_tokens: int) -> None:
        """The first event has come: the prompt has been read, and at most so many of its tokens were found."""
        if self.index is not None:
            self.index.missed(self.replica, self.turns, found_tokens)
            self.index.hold(self.replica, self.keys)

    def ended(self, output: Sequence[int]) -> None:
        """The request has ended. Until now its text was in use; the replica keeps it with the output."""
        if self.index is not None and self.keys:
            self.index.hold(self.replica, self.keys + prefix_keys([*self.open, *output], self.keys[-KEY_BYTES:]))


class PrefixRouter(RequestRouter):
    """The router of the gateway's handle. It prefers the holders of a request's prefix, else two random replicas. Serve
    takes the first of the lists returned that has a replica with room, and of that the least busy. The first list is
    the likely replica alone, noted at once, because other requests on the same document may come before this one is
    accepted.
    """

    def initialize_state(self, *, capacity: int = 0, busier_by: int = 0, **_: Any) -> None:
        """`capacity`: blocks of a replica. `busier_by`: requests more than the least busy that a holder may have."""
        self.busier_by = busier_by
        self.index: PrefixIndex[ReplicaID] = PrefixIndex(capacity)
        self.ongoing: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        await asyncio.sleep(0)  # so that requests which have just been given a replica are sent, and count for its load
        candidate_replicas = allowed(candidate_replicas, pending_request.kwargs.get("avoid", NONE))
        by_chance = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        # if no replica below has room, Serve must wait before it asks again
        pending_request.routing_context.should_backoff = True
        candidates = {replica.replica_id: replica for replica in candidate_replicas}
        route = route_of(pending_request)
        matches = {replica: self.index.match(replica, route.keys) for replica in candidates}
        ongoing = {replica: self.ongoing[replica] for replica in candidates}
        drawn = preferred(matches, len(route.keys) // KEY_BYTES, ongoing, self.busier_by)
        likely = min(drawn or [replica.replica_id for replica in by_chance], key=ongoing.__getitem__)
        route.taken(likely, self.index)
        return [[candidates[likely]], [candidates[replica] for replica in drawn], by_chance]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self.ongoing[replica_id] += 1

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        route_of(pending_request).taken(replica_id, self.index)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        if self.ongoing[replica_id] > 0:
            self.ongoing[replica_id] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._forget_others()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget_others()

    def _forget_others(self) -> None:
        self.index.keep(self.curr_replicas)
        self.ongoing = Counter({replica: self.ongoing[replica] for replica in self.curr_replicas})


def route_of(request: PendingRequest) -> Route:
    return request.kwargs.get("route") or Route()


def allowed(replicas: list[RunningReplica], avoid: Avoid) -> list[RunningReplica]:
    """The replicas that can serve the request; none that has just failed, if there are others. Where all have refused
    it, they are asked again: Serve's router would wait for ever for a replica of an empty list.
    """
    able = [each for each in replicas if each.replica_id.unique_id not in avoid.unable]
    awake = [each for each in able if each.replica_id.unique_id not in avoid.failed]
    return awake or able or replicas
