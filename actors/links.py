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
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, NamedTuple

import grpc

from actors.wire import proposal_batch_from_proto, work_batch_to_proto
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import TierStub
from triforce_core.doorbell import Doorbell
from triforce_core.errors import InvalidValueError
from triforce_core.messages import Proposal, Work

log = logging.getLogger(__name__)

# Of both ends of every connection between a pipeline's processes.
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A node that vanishes closes nothing, and an idle link would wait for it for ever: each end asks the other for a
    # sign of life. gRPC's own threads answer, so that a tier in a long pass is not taken for dead.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # without it a ping is waited for for a minute, whatever the other says
    # By default two pings are sent while a link is idle, and a server hangs up on whoever sends more.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
]
RETRY_S, MAX_RETRY_S = 0.5, 30.0  # doubled with each deadline missed in a row
LOOK_UP_S = 30.0  # for a peer's address; where it loads for longer, it is asked again
OPEN_S = 10.0  # from having an address to the peer's first sign on the stream
SILENT_S = 30.0  # without a sign from the peer, after which a user should hear of it, and as often again


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


class UnansweredWork(NamedTuple):
    """Work that is not answered yet."""

    work: Work
    stated_from: int  # what the peer may not have heard, if it never answers; of work that this one replaced, too
    stream: Stream | None  # what it went out on; None: there was none
    deadline: float  # monotonic seconds

    @property
    def lost(self) -> bool:
        return self.stream is None or not self.stream.open


class RemoteProposer:
    """Used by one thread, as any Proposer is; a thread of its own keeps the stream and rings the doorbell.

    `resolve` gives the peer's address whenever a stream is opened: a restarted tier has another port. A peer that does
    not answer within `timeout_s` seconds is a dead peer. `peer` is its name, for those who read the log.
    """

    def __init__(
        self,
        resolve: Callable[[], str],
        *,
        timeout_s: float,
        doorbell: Doorbell | None = None,
        peer: str = "lower",
    ) -> None:
        self.resolve, self.timeout_s, self.doorbell = resolve, timeout_s, doorbell or Doorbell()
        self.peer, self.address = peer, ""  # where it was last looked for; empty: nobody has told yet
        self.silent_since: float | None = time.monotonic()  # None: it is there, and answers what it is asked
        self.looking_up: Future[str] = Future()  # its address
        self.stream: Stream | None = None  # the latest; None before the first
        self.asked: dict[int, UnansweredWork] = {}  # by sequence id
        self.arrived: queue.SimpleQueue[tuple[Stream, pb.ProposalBatch]] = queue.SimpleQueue()
        self.retry_s = RETRY_S
        self.ready, self.closed = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._keep_stream, name="link", daemon=True)
        self.watch = threading.Thread(target=self._tell_of_silence, name="link-watch", daemon=True)
        self.thread.start()
        self.watch.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether the peer is there, waiting for it up to `timeout_s` seconds."""
        return self.ready.wait(timeout_s)

    @property
    def silent_s(self) -> float:
        """For how many seconds the peer has not been there, or has not answered what it was asked; 0: it does."""
        since = self.silent_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def too_silent(self) -> bool:
        """For so long that a user should know. A peer that is there again and is asked nothing cannot answer."""
        idle = self.ready.is_set() and not self.asked
        return self.silent_s >= SILENT_S and not idle

    def submit(self, work: list[Work]) -> None:
        stream, deadline = self.stream, time.monotonic() + self.timeout_s
        for w in work:
            replaced = self.asked.get(w.span.sequence_id)
            stated_from = min(w.span.start, replaced.stated_from) if replaced else w.span.start
            self.asked[w.span.sequence_id] = UnansweredWork(w, stated_from, stream, deadline)
        if stream is not None and stream.open:
            stream.outgoing.put(work_batch_to_proto(work))

    def collect(self, timeout_s: float) -> list[Proposal]:
        """What has arrived; waits for it, but not when the doorbell rings for somebody else."""
        proposals: list[Proposal] = []
        until, rang = time.monotonic() + timeout_s, False
        while True:
            while not self.arrived.empty():
                proposals += self._take(*self.arrived.get_nowait())
            self._drop_late()
            proposals += self._give_up()
            if proposals or rang or time.monotonic() >= until:
                return proposals
            next_deadline = min((asked.deadline for asked in self.asked.values()), default=until)
            rang = self.doorbell.wait(min(until, next_deadline) - time.monotonic())

    def _drop_late(self) -> None:
        """End the links to peers that did not answer in time."""
        now = time.monotonic()
        late = {asked.stream for asked in self.asked.values() if asked.deadline <= now and not asked.lost}
        for stream in filter(None, late):
            log.warning("the %s tier did not answer within %.1f s: its link is dropped", self.peer, self.timeout_s)
            self.retry_s = min(2 * self.retry_s, MAX_RETRY_S)
            self._fall_silent()
            stream.close()

    def _give_up(self) -> list[Proposal]:
        """What went out on a link that has ended, or on none, is answered empty."""
        lost = [asked for asked in self.asked.values() if asked.lost]
        for asked in lost:
            del self.asked[asked.work.span.sequence_id]
        return [empty_answer(asked.work, asked.stated_from) for asked in lost]

    def _take(self, stream: Stream, batch: pb.ProposalBatch) -> list[Proposal]:
        try:
            received = proposal_batch_from_proto(batch)
        except InvalidValueError as error:
            log.warning("the %s tier sent what is no proposal: its link is dropped (%s)", self.peer, error)
            stream.close()
            return []
        proposals = []
        for proposal in received:
            asked = self.asked.get(proposal.sequence_id)
            if asked is not None and asked.work.span.end == proposal.start:
                del self.asked[proposal.sequence_id]
                proposals.append(proposal)
                self.retry_s, self.silent_since = RETRY_S, None
        return proposals

    def release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.asked.pop(sequence_id, None)
        if self.stream is not None and self.stream.open:
            self.stream.outgoing.put(work_batch_to_proto([], sequence_ids))

    def close(self) -> None:
        """End the stream and its threads."""
        self.closed.set()
        self.looking_up.cancel()
        if self.stream is not None:
            self.stream.close()
        self.thread.join(timeout=5)
        self.watch.join(timeout=5)

    def _fall_silent(self) -> None:
        self.silent_since = self.silent_since or time.monotonic()

    # -- the thread of the stream --------------------------------------------------------------------------------------

    def _keep_stream(self) -> None:
        while not self.closed.is_set():
            stream = Stream()
            try:
                address = self._look_up()
                with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                    self._run(stream, TierStub(channel), address)
            except Exception as error:  # whatever it is, the answer is to try again
                log.info("link down: %s", error.code() if isinstance(error, grpc.RpcError) else repr(error))
            self.ready.clear()
            self._fall_silent()
            stream.close()
            if stream is self.stream:
                self.doorbell.ring()
            self.closed.wait(self.retry_s)

    def _look_up(self) -> str:
        """The peer's address. On a thread of its own, for whatever `resolve` waits for may never come."""
        self.looking_up = found = Future[str]()

        def look() -> None:
            with suppress(InvalidStateError):  # nobody waits any more
                try:
                    found.set_result(self.resolve())
                except Exception as error:
                    found.set_exception(error)

        if self.closed.is_set():
            found.cancel()
        else:
            threading.Thread(target=look, name="link-address", daemon=True).start()
        return found.result(timeout=LOOK_UP_S)

    def _run(self, stream: Stream, stub: TierStub, address: str) -> None:
        """Open the stream and take what comes over it, until it ends. Raises `grpc.RpcError` where it ends in error."""
        if address != self.address:  # a peer that was started anew has missed nothing yet
            self.address, self.retry_s = address, RETRY_S
        stream.call = stub.Propose(iter(stream))
        patience = threading.Timer(OPEN_S, stream.close)  # gRPC has a deadline for the whole of a call only
        patience.daemon = True
        patience.start()
        try:
            stream.call.initial_metadata()  # sent by the peer as soon as it serves us
        finally:
            patience.cancel()
        if stream.call.is_active():
            self.stream = stream
            if self.retry_s == RETRY_S:  # else it has left work unanswered: what counts is an answer
                self.silent_since = None
            self.ready.set()
        if self.closed.is_set():  # before there was a stream to close
            stream.close()
        for batch in stream.call:
            self.arrived.put((stream, batch))
            self.doorbell.ring()

    # -- the thread that watches ---------------------------------------------------------------------------------------

    def _tell_of_silence(self) -> None:
        """Say it as long as it lasts: without this, all that a user sees is that it is slow."""
        told = time.monotonic()
        while not self.closed.wait(SILENT_S / 10):
            if self.too_silent and time.monotonic() - told >= SILENT_S:
                told = time.monotonic()
                where = f"at {self.address}" if self.address else "and has told no address"
                log.warning("the %s tier has not answered for %.0f s, %s", self.peer, self.silent_s, where)


def empty_answer(work: Work, stated_from: int) -> Proposal:
    """In place of a peer's: nothing proposed, and the peer must not be believed to hold what we stated."""
    return Proposal(work.span.sequence_id, work.span.end, missing_from=stated_from)
