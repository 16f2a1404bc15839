"""Routes a request to the replica that was sent most of its prefix, unless that replica is much busier than another.

The gateway's process sends all requests, so it knows what each replica was sent without asking the replicas.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deploy.prefixes import PrefixIndex, preferred
from deploy.shunned import NONE, Avoid


class PrefixRouter(RequestRouter):
    """The router of the gateway's handle. It prefers the holders of a request's prefix, else two random replicas.

    A request carries the keys of its prefix in the keyword `prefix`. Of the lists of replicas that `choose_replicas`
    returns, Serve takes the first that has a replica with room, and of that list the least busy replica.
    """

    def initialize_state(self, *, capacity: int = 0, busier_by: int = 0, **_: Any) -> None:
        """`capacity` is the number of blocks that a replica can hold.

        `busier_by` is how many requests more than the least busy replica a holder of the prefix may have.
        """
        self.busier_by = busier_by
        self.index: PrefixIndex[ReplicaID] = PrefixIndex(capacity)
        self.ongoing: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        candidate_replicas = allowed(candidate_replicas, pending_request.kwargs.get("avoid", NONE))
        by_chance = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        # if no replica below has room, Serve must wait before it asks again
        pending_request.routing_context.should_backoff = True
        candidates = {replica.replica_id: replica for replica in candidate_replicas}
        holders = self.index.holders(candidates, prefix_of(pending_request))
        ongoing = {replica: self.ongoing[replica] for replica in candidates}
        return [[candidates[replica] for replica in preferred(holders, ongoing, self.busier_by)], by_chance]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self.ongoing[replica_id] += 1

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if keys := prefix_of(pending_request):
            self.index.add(replica_id, keys)

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


def allowed(replicas: list[RunningReplica], avoid: Avoid) -> list[RunningReplica]:
    """The replicas that can serve the request; none that has just failed, if there are others."""
    able = [each for each in replicas if each.replica_id.unique_id not in avoid.unable]
    awake = [each for each in able if each.replica_id.unique_id not in avoid.failed]
    return awake or able


def prefix_of(request: PendingRequest) -> bytes:
    prefix: bytes = request.kwargs.get("prefix", b"")
    return prefix
