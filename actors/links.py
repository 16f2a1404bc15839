"""The upper end of a link: a tier in another process, as a Proposer.

Every Work gets an answer. Where the peer is dead, hung or not there yet the answer is an empty proposal, so that the
level above goes on with one plain step; the link is rebuilt in the background, and what the peer then lacks it says.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc

from actors.wire import proposal_batch_from_proto, work_batch_to_proto
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import TierStub
from triforce_core.doorbell import Doorbell
from triforce_core.errors import InvalidValueError
from triforce_core.messages import Proposal, Work

log = logging.getLogger(__name__)

CHANNEL_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
RETRY_S, MAX_RETRY_S = 0.5, 30.0  # doubled with each deadline missed in a row


class Stream:
    """One life of a link: what goes out on it, and the call that carries it."""

    def __init__(self) -> None:
        self.outgoing: queue.SimpleQueue[pb.WorkBatch | None] = queue.SimpleQueue()
        self.call: Any = None  # the gRPC call, once made
        self.open = True

    def __iter__(self) -> Iterator[pb.WorkBatch]:
        while (batch := self.outgoing.get()) is not None:
            yield batch

    def close(self) -> None:
        """End it, from either side's thread, also when the peer hangs."""
        self.open = False
        self.outgoing.put(None)
        if self.call is not None:
            self.call.cancel()


Arrival = tuple[Stream, pb.ProposalBatch] | Stream  # a batch and what it came over, or a stream that has ended


class Pending(NamedTuple):
    """Work that the peer owes an answer to."""

    work: Work
    stated_from: int  # what it may not have heard, if it never answers; of work that this one replaced, too
    stream: Stream
    deadline: float  # monotonic seconds


class RemoteProposer:
    """Used by one thread, as any Proposer is; a thread of its own keeps the stream and rings the doorbell.

    `resolve` gives the peer's address whenever a stream is opened: a restarted tier has another port. A peer that does
    not answer within `timeout_s` seconds is a dead peer.
    """

    def __init__(self, resolve: Callable[[], str], *, timeout_s: float, doorbell: Doorbell | None = None) -> None:
        self.resolve, self.timeout_s, self.doorbell = resolve, timeout_s, doorbell or Doorbell()
        self.stream: Stream | None = None  # the latest; None before the first
        self.pending: dict[int, Pending] = {}  # by sequence id
        self.unsent: list[Proposal] = []  # the empty answers to work that could not be sent
        self.arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.retry_s = RETRY_S
        self.ready, self.closed = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._keep_stream, name="link", daemon=True)
        self.thread.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether the peer is there, waiting for it up to `timeout_s` seconds."""
        return self.ready.wait(timeout_s)

    def submit(self, work: list[Work]) -> None:
        stream, deadline = self.stream, time.monotonic() + self.timeout_s
        for w in work:
            replaced = self.pending.pop(w.span.sequence_id, None)
            stated_from = min(w.span.start, replaced.stated_from) if replaced else w.span.start
            if stream is None or not stream.open:
                self.unsent.append(empty_answer(w, stated_from))
            else:
                self.pending[w.span.sequence_id] = Pending(w, stated_from, stream, deadline)
        if stream is not None and stream.open:
            stream.outgoing.put(work_batch_to_proto(work))

    def collect(self, timeout_s: float) -> list[Proposal]:
        """What has arrived; waits for it, but not when the doorbell rings for somebody else."""
        proposals, self.unsent = self.unsent, []
        until, rang = time.monotonic() + timeout_s, False
        while True:
            while not self.arrived.empty():
                proposals += self._take(self.arrived.get_nowait())
            proposals += self._give_up_late()
            if proposals or rang or time.monotonic() >= until:
                return proposals
            next_deadline = min((p.deadline for p in self.pending.values()), default=until)
            rang = self.doorbell.wait(min(until, next_deadline) - time.monotonic())

    def _give_up_late(self) -> list[Proposal]:
        """Drop the links of peers that did not answer in time."""
        proposals = []
        for stream in {p.stream for p in self.pending.values() if p.deadline <= time.monotonic()}:
            log.warning("a tier did not answer within %.1f s: its link is dropped", self.timeout_s)
            self.retry_s = min(2 * self.retry_s, MAX_RETRY_S)
            stream.close()
            proposals += self._give_up(stream)
        return proposals

    def _take(self, arrived: Arrival) -> list[Proposal]:
        if isinstance(arrived, Stream):
            return self._give_up(arrived)
        stream, batch = arrived
        try:
            received = proposal_batch_from_proto(batch)
        except InvalidValueError as error:
            log.warning("a tier sent what is no proposal: its link is dropped (%s)", error)
            stream.close()
            return self._give_up(stream)
        proposals = []
        for proposal in received:
            pending = self.pending.get(proposal.sequence_id)
            if pending is not None and pending.work.span.end == proposal.start:
                del self.pending[proposal.sequence_id]
                proposals.append(proposal)
                self.retry_s = RETRY_S
        return proposals

    def _give_up(self, stream: Stream) -> list[Proposal]:
        """The stream has ended: what was sent over it and not answered is answered empty."""
        lost = [p for p in self.pending.values() if p.stream is stream]
        for pending in lost:
            del self.pending[pending.work.span.sequence_id]
        return [empty_answer(p.work, p.stated_from) for p in lost]

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.pending.pop(sequence_id, None)
        if self.stream is not None and self.stream.open:
            self.stream.outgoing.put(work_batch_to_proto([], sequence_ids))

    def close(self) -> None:
        """End the stream and its thread."""
        self.closed.set()
        if self.stream is not None:
            self.stream.close()
        self.thread.join(timeout=5)

    def _keep_stream(self) -> None:
        while not self.closed.is_set():
            stream, was_open = Stream(), False
            try:
                with grpc.insecure_channel(self.resolve(), options=CHANNEL_OPTIONS) as channel:
                    stream.call = TierStub(channel).Propose(iter(stream))
                    stream.call.initial_metadata()  # sent by the peer as soon as it serves us
                    if was_open := stream.call.is_active():
                        self.stream = stream
                        self.ready.set()
                    if self.closed.is_set():  # before there was a stream to close
                        stream.close()
                    for batch in stream.call:
                        self.arrived.put((stream, batch))
                        self.doorbell.ring()
            except Exception as error:  # whatever it is, the answer is to try again
                log.info("link down: %s", error.code() if isinstance(error, grpc.RpcError) else error)
            self.ready.clear()
            stream.close()
            if was_open:
                self.arrived.put(stream)
                self.doorbell.ring()
            self.closed.wait(self.retry_s)


def empty_answer(work: Work, stated_from: int) -> Proposal:
    """In place of a peer's: nothing proposed, and the peer must not be believed to hold what we stated."""
    return Proposal(work.span.sequence_id, work.span.end, missing_from=stated_from)
