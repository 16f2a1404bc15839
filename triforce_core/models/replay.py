"""Replay: the followers of a tier repeat, on their KV caches and in order, every call by which the leader changes its
own. The bookkeeping of a cache depends only on these calls, so the ranks exchange nothing else. The leader's runner,
scheduler and snapshot policy call a `LeadingKV` as if it were the cache; on each follower a `CallExecutor` repeats the
calls.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from triforce_core.kv.base import Batch, Forward, Held, KVCache, KVGeometry
from triforce_core.kv.full import FullKV
from triforce_core.kv.retrieval import RetrievalKV
from triforce_core.kv.selectors import Selector
from triforce_core.kv.shards import split
from triforce_core.kv.snapshot import ChunkSettings, Snapshot
from triforce_core.messages import SequenceSpec, Tier
from triforce_core.models.rank_group import Follower, Leader, outline
from triforce_core.models.runner import ModelRunner

# A command is what a follower does, a method of `CallExecutor`, and its arguments.
Command = tuple[Callable[..., None], tuple[Any, ...]]


class LeadingKV:
    """The leader's cache of one tier; it broadcasts every change to the followers."""

    def __init__(self, kv: KVCache, tier: Tier, ranks: Leader) -> None:
        self.kv, self.tier, self.ranks, self.room = kv, tier, ranks, kv.room
        self.most_nodes = kv.most_nodes
        self.order = threading.RLock()  # keeps calls and broadcasts in one order, because other threads bring snapshots

    @property
    def geometry(self) -> KVGeometry:
        """The geometry of this rank's share."""
        return self.kv.geometry

    @property
    def held(self) -> Mapping[int, Held]:
        return self.kv.held

    def prepare(self, forwards: list[Forward]) -> Batch:
        with self.order:
            self.broadcast(CallExecutor.run_pass, self.tier, forwards)
            batch = self.kv.prepare(forwards)
            self.ranks.expect(batch.num_tokens)
            return batch

    def release(self, sequence_id: int) -> None:
        with self.order:
            self.broadcast(CallExecutor.release, self.tier, sequence_id)
            self.kv.release(sequence_id)

    def broadcast(self, call: Callable[..., None], *arguments: Any) -> None:
        """Have every follower make this call, a method of its `CallExecutor`."""
        self.ranks.broadcast((call, arguments))


class LeadingFullKV(LeadingKV):
    """The leader's cache of the target. `gathered`: `cut` returns whole snapshots, else this rank's share."""

    def __init__(self, kv: FullKV, ranks: Leader, *, gathered: bool) -> None:
        super().__init__(kv, Tier.TARGET, ranks)
        self.full, self.gathered = kv, gathered
        # What only reads changes no rank's cache.
        self.look, self.matched, self.can_open = kv.look, kv.matched, kv.can_open
        self.keys_after, self.hemmed_in = kv.keys_after, kv.hemmed_in

    @property
    def used_tokens(self) -> int:
        return self.full.used_tokens

    @property
    def kept_tokens(self) -> int:
        return self.full.kept_tokens

    @property
    def dropped_tokens(self) -> int:
        return self.full.dropped_tokens

    def open(
        self, sequence_id: int, spec: SequenceSpec, tokens: int | None = None, text: Sequence[int] = ()
    ) -> Held | None:
        with self.order:
            self.broadcast(CallExecutor.open, sequence_id, spec, tokens, tuple(text))
            return self.full.open(sequence_id, spec, tokens, text)

    def grow(self, sequence_id: int, tokens: int) -> bool:
        with self.order:
            if tokens > self.full.room(self.full.held[sequence_id]):  # else nothing changes
                self.broadcast(CallExecutor.grow, sequence_id, tokens)
            return self.full.grow(sequence_id, tokens)

    def cut(
        self, sequence_id: int, position: int, chunks: ChunkSettings, selector: Selector, base: int = 0
    ) -> Snapshot:
        call = (sequence_id, position, chunks, selector, base)
        self.broadcast(CallExecutor.cut, *call, self.gathered)
        try:
            snapshot = self.full.cut(*call)
            return self.ranks.gather(snapshot) if self.gathered else snapshot
        except Exception as error:  # the followers wait for this rank
            self.ranks.abort(f"a cut has failed: {error}")


class LeadingRetrievalKV(LeadingKV):
    """The leader's cache of the retrieval tier. Any thread may bring snapshots, but only the thread that runs passes
    sends them to the followers, because only one thread may use torch.distributed.
    """

    def __init__(self, kv: RetrievalKV, ranks: Leader) -> None:
        super().__init__(kv, Tier.RETRIEVAL, ranks)
        self.sparse, self.confirmed, self.is_live = kv, kv.confirmed, kv.is_live
        self.taken: list[list[Snapshot]] = []  # snapshots not sent to the followers yet, as the shares of all ranks

    def take(self, snapshot: Snapshot) -> bool:
        """Take a snapshot with the KV heads of all ranks; returns what `RetrievalKV.take` returns."""
        shares = split(snapshot, self.ranks.world)
        with self.order:
            accepted = self.sparse.take(shares[0])
            if accepted:
                self.taken.append(shares)
        return accepted

    def drop_unstated(self) -> None:
        with self.order:
            self.broadcast(CallExecutor.drop_unstated)
            self.sparse.drop_unstated()

    # For a chain in one process: each rank has cut its share itself.

    def deliver(self, snapshot: Snapshot) -> None:
        self.broadcast(CallExecutor.deliver)
        self.sparse.take(snapshot)

    def busy(self, sequence_id: int) -> bool:
        return False

    def broadcast(self, call: Callable[..., None], *arguments: Any) -> None:
        taken, self.taken = self.taken, []
        for shares in taken:
            super().broadcast(CallExecutor.take, [outline(share) for share in shares])
            self.ranks.scatter(shares[1:])
        super().broadcast(call, *arguments)


class LeadingRunner(ModelRunner):
    """A runner that ends all ranks when a pass fails, because the other ranks would hang in theirs."""

    kv: LeadingKV

    def forward(self, forwards: list[Forward]) -> tuple[Tensor, Batch]:
        try:
            return super().forward(forwards)
        except Exception as error:
            self.kv.ranks.abort(f"a pass has failed: {error}")


class CallExecutor:
    """A follower's caches and runners, the same as its leader's, each with this rank's share of the KV."""

    def __init__(self, group: Follower, full: FullKV | None, sparse: RetrievalKV | None) -> None:
        """A cache that the leader has not is None, and the leader makes no call on it."""
        self.group, self.full, self.sparse = group, cast(FullKV, full), cast(RetrievalKV, sparse)
        self.runners: dict[Tier, ModelRunner] = {}
        self.last_cut: Snapshot | None = None

    def follow(self) -> None:
        """Execute the leader's commands until the leader stops."""
        while (command := self.group.receive()) is not None:
            self.execute(command)

    def execute(self, command: Command) -> None:
        call, arguments = command
        call(self, *arguments)

    def run_pass(self, tier: Tier, forwards: list[Forward]) -> None:
        self.runners[tier].forward(forwards)  # the logits are dropped: every rank has the same

    def open(self, sequence_id: int, spec: SequenceSpec, tokens: int | None, text: tuple[int, ...]) -> None:
        """Open a sequence in the target's cache. Each rank matches the text with the KV in its own pool."""
        self.full.open(sequence_id, spec, tokens, text)

    def grow(self, sequence_id: int, tokens: int) -> None:
        self.full.grow(sequence_id, tokens)

    def release(self, tier: Tier, sequence_id: int) -> None:
        (self.full if tier is Tier.TARGET else self.sparse).release(sequence_id)

    def cut(
        self, sequence_id: int, position: int, chunks: ChunkSettings, selector: Selector, base: int, gathered: bool
    ) -> None:
        """`gathered`: the leader collects the ranks' shares; else each rank keeps its share for `deliver`."""
        share = self.full.cut(sequence_id, position, chunks, selector, base)
        if gathered:
            self.group.give(share)
        else:
            self.last_cut = share

    def take(self, outlines: list[Snapshot]) -> None:
        """Take a snapshot for the retrieval tier: the leader sends the contents of each rank's share after this."""
        share = outlines[self.group.rank]
        self.sparse.take(self.group.accept(share, self.sparse.geometry.device))

    def deliver(self) -> None:
        """Every rank puts the share that it cut last into its own retrieval cache."""
        assert self.last_cut is not None
        self.sparse.take(self.last_cut)
        self.last_cut = None

    def drop_unstated(self) -> None:
        self.sparse.drop_unstated()
