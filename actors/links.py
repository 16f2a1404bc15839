"""The upper end of a link: a tier in another process, as a Proposer.

Every Work gets an answer, unless later Work for the same sequence replaces it. If the peer is dead, hung or not yet
connected, the answer is an empty proposal, so that the level above goes on with one plain decoding step. The link is
rebuilt in the background; the peer then reports which tokens it lacks.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, NamedTuple

import grpc

from actors.admission import Address
from actors.encryption import channel
from actors.wire import proposal_batch_from_proto, work_batch_to_proto
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import TierStub
from triforce_core.doorbell import Doorbell
from triforce_core.errors import InvalidValueError
from triforce_core.messages import Proposal, Work

log = logging.getLogger(__name__)

# gRPC options for both ends of every connection between a pipeline's processes.
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A node that vanishes closes no connection, and an idle link would wait for it for ever, so each end pings the
    # other. gRPC's own threads answer pings, so a tier in a long pass is not taken for dead.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Without this option gRPC waits a minute for the answer to a ping, whatever keepalive_timeout_ms is.
    ("grpc.http2.ping_timeout_ms", 10_000),
    # By default a client sends at most two pings on an idle link, and a server closes the connection of one that sends
    # more.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
]
RETRY_S, MAX_RETRY_S = 0.5, 30.0  # delay before reconnecting; doubles with each deadline missed in a row
LOOK_UP_S = 30.0  # limit for looking up a peer's address; a peer that loads for longer is looked up again
OPEN_S = 10.0  # limit from knowing the address to the peer's first response on the stream
SILENT_S = 30.0  # silence of the peer after which a warning is logged, and the interval between warnings


class Stream:
    """One connection of a link: its outgoing batches, and the gRPC call that carries them."""

    def __init__(self) -> None:
        self.outgoing: queue.SimpleQueue[pb.WorkBatch | None] = queue.SimpleQueue()
        self.call: Any = None  # the gRPC call, once made
        self.open = True

    def __iter__(self) -> Iterator[pb.WorkBatch]:
        while (batch := self.outgoing.get()) is not None:
            yield batch

    def close(self) -> None:
        """End the stream, even if the peer hangs. Any thread may call this."""
        self.open = False
        self.outgoing.put(None)
        if self.call is not None:
            self.call.cancel()


class UnansweredWork(NamedTuple):
    """Work that has no answer yet."""

    work: Work
    # The smallest start of this work and of unanswered work that it replaced: the peer may lack the text from here on.
    stated_from: int
    stream: Stream | None  # the stream that it was sent on; None if there was none
    deadline: float  # monotonic seconds

    @property
    def lost(self) -> bool:
        return self.stream is None or not self.stream.open


class RemoteProposer:
    """A Proposer over a link.

    `resolve` returns the peer's address. It is called whenever a stream is opened, because a restarted tier has another
    port. A peer that does not answer within `timeout_s` seconds is taken for dead.
    """

    def __init__(
        self, resolve: Callable[[], Address], *, timeout_s: float, doorbell: Doorbell | None = None, peer: str = "lower"
    ) -> None:
        self.resolve, self.timeout_s, self.doorbell = resolve, timeout_s, doorbell or Doorbell()
        self.peer, self.address = peer, Address("", "")  # the last one tried; empty while it is unknown
        self.silent_since: float | None = time.monotonic()  # None: the peer is connected and answers its work
        self.looking_up: Future[Address] = Future()  # the peer's address
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
        """Wait up to `timeout_s` seconds for the peer; returns whether it is connected."""
        return self.ready.wait(timeout_s)

    @property
    def silent_s(self) -> float:
        """Seconds for which the peer has been disconnected or has left work unanswered; 0 if it answers."""
        since = self.silent_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def too_silent(self) -> bool:
        """Whether the silence is long enough to report; never if a connected peer has no work to answer."""
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
        """The answers that have arrived, waiting up to `timeout_s` seconds for one. Several inboxes of a thread share
        one doorbell, so a ring for another inbox may make this return early with nothing.
        """
        proposals: list[Proposal] = []
        until, rang = time.monotonic() + timeout_s, False
        while True:
            # Lost work is listed before `arrived` is emptied. If `arrived` were emptied first, an answer could arrive
            # after that, and its stream could end, before lost work is listed. Answered work would then be given up.
            lost = [sequence_id for sequence_id, asked in self.asked.items() if asked.lost]
            while not self.arrived.empty():
                proposals += self._take(*self.arrived.get_nowait())
            proposals += self._give_up(lost)
            proposals += self._give_up(self._drop_late())
            if proposals or rang or time.monotonic() >= until:
                return proposals
            next_deadline = min((asked.deadline for asked in self.asked.values()), default=until)
            rang = self.doorbell.wait(min(until, next_deadline) - time.monotonic())

    def _drop_late(self) -> list[int]:
        """Close the streams whose work was not answered in time. Returns the ids of the sequences sent on them."""
        now = time.monotonic()
        late = {asked.stream for asked in self.asked.values() if asked.deadline <= now and not asked.lost}
        for stream in filter(None, late):
            log.warning("the %s tier did not answer within %.1f s: its link is dropped", self.peer, self.timeout_s)
            self.retry_s = min(2 * self.retry_s, MAX_RETRY_S)
            self._fall_silent()
            stream.close()
        return [sequence_id for sequence_id, asked in self.asked.items() if asked.stream in late]

    def _give_up(self, sequence_ids: list[int]) -> list[Proposal]:
        """Empty answers for those of these sequences that are still unanswered, whose peer may lack what was sent."""
        lost = [self.asked.pop(sequence_id) for sequence_id in sequence_ids if sequence_id in self.asked]
        return [
            Proposal(each.work.span.sequence_id, each.work.span.end, missing_from=each.stated_from) for each in lost
        ]

    def _take(self, stream: Stream, batch: pb.ProposalBatch) -> list[Proposal]:
        try:
            received = proposal_batch_from_proto(batch)
        except InvalidValueError as error:
            log.warning("the %s tier sent an invalid proposal: its link is dropped (%s)", self.peer, error)
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
                with channel(grpc, address.place, CHANNEL_OPTIONS) as opened:
                    self._run(stream, TierStub(opened), address)
            except Exception as error:  # after any error, try again
                log.info("link down: %s", error.code() if isinstance(error, grpc.RpcError) else repr(error))
            self.ready.clear()
            self._fall_silent()
            stream.close()
            if stream is self.stream:
                self.doorbell.ring()
            self.closed.wait(self.retry_s)

    def _look_up(self) -> Address:
        """The peer's address, by a thread of its own, because `resolve` may never return. Raises `TimeoutError`."""
        self.looking_up = found = Future[Address]()

        def look() -> None:
            with suppress(InvalidStateError):  # the caller no longer waits
                try:
                    found.set_result(self.resolve())
                except Exception as error:
                    found.set_exception(error)

        if self.closed.is_set():
            found.cancel()
        else:
            threading.Thread(target=look, name="link-address", daemon=True).start()
        return found.result(timeout=LOOK_UP_S)

    def _run(self, stream: Stream, stub: TierStub, address: Address) -> None:
        """Open the stream and receive batches until it ends. Raises `grpc.RpcError` if it ends in an error."""
        if address != self.address:  # a restarted peer has missed no deadline yet
            self.address, self.retry_s = address, RETRY_S
        stream.call = stub.Propose(iter(stream), metadata=address.metadata)
        patience = threading.Timer(OPEN_S, stream.close)  # gRPC offers a deadline for a whole call only
        patience.daemon = True
        patience.start()
        try:
            stream.call.initial_metadata()  # the peer sends it as soon as it serves this stream
        finally:
            patience.cancel()
        if stream.call.is_active():
            self.stream = stream
            # If work was left unanswered, `retry_s` is longer than `RETRY_S`. Then only an answer ends the silence.
            if self.retry_s == RETRY_S:
                self.silent_since = None
            self.ready.set()
        if self.closed.is_set():  # `close` ran before there was a stream to close
            stream.close()
        for batch in stream.call:
            self.arrived.put((stream, batch))
            self.doorbell.ring()

    # -- the thread that watches ---------------------------------------------------------------------------------------

    def _tell_of_silence(self) -> None:
        """Log warnings as long as the peer is silent: otherwise a user would only see slow decoding."""
        told = time.monotonic()
        while not self.closed.wait(SILENT_S / 10):
            if self.too_silent and time.monotonic() - told >= SILENT_S:
                told = time.monotonic()
                where = f"at {self.address.place}" if self.address.place else "and its address is unknown"
                log.warning("the %s tier has not answered for %.0f s, %s", self.peer, self.silent_s, where)
