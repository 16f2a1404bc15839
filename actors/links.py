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

import grpc

from actors.wire import proposal_batch_from_proto, work_batch_to_proto
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import TierStub
from triforce_core.messages import Proposal, Work

log = logging.getLogger(__name__)

CHANNEL_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
RETRY_S = 0.5


class Stream:
    """One life of a link: what goes out on it, and when it has ended."""

    def __init__(self) -> None:
        self.outgoing: queue.SimpleQueue[pb.WorkBatch | None] = queue.SimpleQueue()
        self.open = True

    def __iter__(self) -> Iterator[pb.WorkBatch]:
        while (batch := self.outgoing.get()) is not None:
            yield batch

    def close(self) -> None:
        self.open = False
        self.outgoing.put(None)


class RemoteProposer:
    """Used by one thread, as any Proposer is; a thread of its own keeps the stream.

    `resolve` gives the peer's address whenever a stream is opened: a restarted tier has another port. A peer that does
    not answer within `timeout_s` seconds is a dead peer.
    """

    def __init__(self, resolve: Callable[[], str], *, timeout_s: float) -> None:
        self.resolve, self.timeout_s = resolve, timeout_s
        self.stream: Stream | None = None  # None while there is no peer
        self.pending: dict[int, tuple[Work, float]] = {}  # by sequence id, with the deadline (monotonic seconds)
        self.unsent: list[Work] = []  # answered empty at the next collect
        self.arrived: queue.SimpleQueue[pb.ProposalBatch | Stream] = queue.SimpleQueue()  # a Stream: it has ended
        self.ready, self.closed = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._keep_stream, name="link", daemon=True)
        self.thread.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether the peer is there, waiting for it up to `timeout_s` seconds."""
        return self.ready.wait(timeout_s)

    def submit(self, work: list[Work]) -> None:
        stream = self.stream
        if stream is None or not stream.open:
            self.unsent += work
            return
        deadline = time.monotonic() + self.timeout_s
        self.pending.update({w.span.sequence_id: (w, deadline) for w in work})
        stream.outgoing.put(work_batch_to_proto(work))

    def collect(self, timeout_s: float) -> list[Proposal]:
        proposals, self.unsent = [empty_answer(w) for w in self.unsent], []
        until = time.monotonic() + timeout_s
        while True:
            wait_s = 0.0 if proposals else min([until, *(d for _, d in self.pending.values())]) - time.monotonic()
            try:
                proposals += self._take(self.arrived.get(timeout=wait_s) if wait_s > 0 else self.arrived.get_nowait())
            except queue.Empty:
                if any(deadline <= time.monotonic() for _, deadline in self.pending.values()):
                    log.warning("a tier did not answer within %.1f s: its link is dropped", self.timeout_s)
                    proposals += self._give_up()
                if proposals or time.monotonic() >= until:
                    return proposals

    def _take(self, arrived: pb.ProposalBatch | Stream) -> list[Proposal]:
        if isinstance(arrived, Stream):
            return self._give_up() if arrived is self.stream else []
        proposals = []
        for proposal in proposal_batch_from_proto(arrived):
            work, _ = self.pending.get(proposal.sequence_id, (None, 0.0))
            if work is not None and work.span.end == proposal.start:
                del self.pending[proposal.sequence_id]
                proposals.append(proposal)
        return proposals

    def _give_up(self) -> list[Proposal]:
        """The stream has ended or must end: what is pending is answered empty."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None
        answers = [empty_answer(work) for work, _ in self.pending.values()]
        self.pending.clear()
        return answers

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
            stream = Stream()
            try:
                with grpc.insecure_channel(self.resolve(), options=CHANNEL_OPTIONS) as channel:
                    call = TierStub(channel).Propose(iter(stream))
                    call.initial_metadata()  # sent by the peer as soon as it serves us
                    self.stream = stream
                    self.ready.set()
                    for batch in call:
                        if not stream.open:
                            call.cancel()
                        self.arrived.put(batch)
            except Exception as error:  # whatever it is, the answer is to try again
                log.info("link down: %s", error.code() if isinstance(error, grpc.RpcError) else error)
            self.ready.clear()
            stream.close()
            self.arrived.put(stream)
            self.closed.wait(RETRY_S)


def empty_answer(work: Work) -> Proposal:
    return Proposal(work.span.sequence_id, work.span.end)
