"""The lower end of a link: a Proposer behind a gRPC server, and the thread that drives the Proposer."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from actors.admission import Address, LinkAdmission
from actors.encryption import serve_on
from actors.links import CHANNEL_OPTIONS
from actors.wire import ANY_TIER, Bounds, proposal_batch_to_proto, work_batch_from_proto
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import TierServicer, add_TierServicer_to_server
from triforce_core.doorbell import Doorbell
from triforce_core.errors import InvalidValueError
from triforce_core.messages import Proposal, Proposer, Tier, Work

log = logging.getLogger(__name__)

POLL_S = 0.2
MAX_FAILURES = 5
MAX_LINKS = 64  # each takes two threads; the tier above has one link, and may leave dead ones behind


class LinkThreads(ThreadPoolExecutor):
    """Runs each call on a daemon thread. The base class joins its threads at exit, which an open link would block."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="link-server", daemon=True).start()
        return future


class LinkServer:
    """Serves a tier to the tier above. Synchronous gRPC saves two thread wake-ups per block against `grpc.aio`. Calls
    beyond `MAX_LINKS` are refused, because a waiting call would look like a tier that hangs.
    """

    def __init__(self, host: str, tier_server: TierServer) -> None:
        self.admission = LinkAdmission()
        self.server = grpc.server(
            LinkThreads(),
            interceptors=[self.admission],
            options=CHANNEL_OPTIONS,
            maximum_concurrent_rpcs=MAX_LINKS,
        )
        add_TierServicer_to_server(tier_server, self.server)
        self.address = Address(serve_on(self.server, host), self.admission.secret)
        self.server.start()

    def stop(self, grace_s: float = 1.0) -> None:
        self.server.stop(grace_s).wait()


class Link:
    """One stream from the tier above, with the answers to send on it."""

    def __init__(self) -> None:
        self.outgoing: queue.SimpleQueue[pb.ProposalBatch | None] = queue.SimpleQueue()

    def send(self, batch: pb.ProposalBatch) -> None:
        """Queue a batch. May be called from any thread."""
        self.outgoing.put(batch)

    def close(self) -> None:
        self.outgoing.put(None)

    def __iter__(self) -> Iterator[pb.ProposalBatch]:
        while (batch := self.outgoing.get()) is not None:
            yield batch


@dataclass(frozen=True, slots=True)
class Ended:
    """In the inbox, states that a link has ended."""

    link: Link


@dataclass(frozen=True, slots=True)
class Message:
    """A batch that came over a link."""

    link: Link
    work: list[Work]
    released: list[int]  # sequence ids


@dataclass(slots=True)
class Served:
    """The link that a sequence is served over, and whether its last work was answered."""

    link: Link
    end: int  # end position of the last work's span
    answered: bool = False


class TierServer(TierServicer):
    """Serves one Proposer, driven by a single worker thread; gRPC's threads only move messages. The doorbell wakes the
    worker for work from above and, if the proposer drafts over a link, for answers too.
    """

    def __init__(
        self,
        proposer: Proposer,
        tier: Tier,
        above: Tier,
        doorbell: Doorbell | None = None,
        can_run_ahead: Callable[[], bool] = lambda: False,
        link_ended: Callable[[], None] = lambda: None,
        bounds: Bounds = ANY_TIER,
    ) -> None:
        """`link_ended` is called by the worker when the last open link has ended and its sequences are released."""
        self.proposer, self.tier, self.doorbell = proposer, tier, doorbell or Doorbell()
        self.can_run_ahead = can_run_ahead  # whether to go on collecting when no answer is owed
        self.link_ended, self.bounds = link_ended, bounds
        self.links: set[Link] = set()  # those that are open
        self.inbox: queue.SimpleQueue[Message | Ended] = queue.SimpleQueue()
        self.served: dict[int, Served] = {}  # by sequence id
        self.counters = pb.LinkCounters(link=f"{above.name.lower()}>{tier.name.lower()}")
        self.counting = threading.Lock()  # several threads count, those of each link
        self.stopping = threading.Event()
        self.worker = threading.Thread(target=self._work, name=f"{tier.name.lower()}-worker", daemon=True)
        self.worker.start()

    # -- gRPC's threads ------------------------------------------------------------------------------------------------

    def Propose(
        self, request_iterator: Iterator[pb.WorkBatch], context: grpc.ServicerContext
    ) -> Iterator[pb.ProposalBatch]:
        link = Link()
        self.links.add(link)  # before the tier above learns of the link, since it may send snapshots from then on
        threading.Thread(target=self._read, args=(request_iterator, context, link), name="link", daemon=True).start()
        context.send_initial_metadata(())
        for batch in link:
            with self.counting:
                self.counters.bytes_out += batch.ByteSize()
            yield batch

    def _read(self, batches: Iterator[pb.WorkBatch], context: grpc.ServicerContext, link: Link) -> None:
        try:
            for batch in batches:
                self._take(link, batch)
        except InvalidValueError as error:
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            context.set_details(str(error))
        except grpc.RpcError:
            log.debug("a link has ended")
        except Exception:
            log.exception("%s tier: a link failed", self.tier.name.lower())
            context.set_code(grpc.StatusCode.INTERNAL)
        finally:
            link.close()
            self.links.discard(link)
            self.inbox.put(Ended(link))
            self.doorbell.ring()

    def _take(self, link: Link, batch: pb.WorkBatch) -> None:
        work, released = work_batch_from_proto(batch, self.bounds)
        with self.counting:
            self.counters.work_items += len(work)
            self.counters.work_tokens += sum(len(w.span.tokens) for w in work)
            self.counters.bytes_in += batch.ByteSize()
        self.inbox.put(Message(link, work, released))
        self.doorbell.ring()

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.TierStatus:
        return self.status()

    def status(self) -> pb.TierStatus:
        return pb.TierStatus(
            tier=self.tier.name.lower(),
            ready=self.worker.is_alive(),
            live_sequences=len(self.served),
            links=[self.counters],
        )

    # -- worker thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        failures = 0
        while not self.stopping.is_set():
            try:
                self._take_messages()
                if self.can_run_ahead() or not all(served.answered for served in self.served.values()):
                    self._send(self.proposer.collect(POLL_S))
                    failures = 0  # reset only after a turn with work: an idle turn is no success
                else:
                    self.doorbell.wait(POLL_S)
            except Exception:
                failures += 1
                log.exception("%s tier: a round failed, %d in a row", self.tier.name.lower(), failures)
                try:
                    self._abandon()
                except Exception:
                    log.exception("%s tier: its sequences cannot be released", self.tier.name.lower())
                    failures = MAX_FAILURES
                if failures >= MAX_FAILURES:  # a broken device never recovers in this process, but may in a new one
                    os._exit(1)

    def _take_messages(self) -> None:
        while not self.inbox.empty():
            message = self.inbox.get_nowait()
            if isinstance(message, Ended):
                self._release([i for i, served in self.served.items() if served.link is message.link])
                if not self.links:  # another link means that the tier above lives, so its snapshots here are kept
                    self.link_ended()
                continue
            link, work, released = message.link, message.work, message.released
            self.served.update({w.span.sequence_id: Served(link, w.span.end) for w in work})
            if work:
                self.proposer.submit(work)
            # Another link may have taken over a sequence that this link releases.
            self._release([i for i in released if i not in self.served or self.served[i].link is link])

    def _release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.served.pop(sequence_id, None)
        if sequence_ids:
            self.proposer.release(sequence_ids)

    def _abandon(self) -> None:
        """After a failed round, answer all work at once with empty proposals and forget all sequences."""
        self._send([Proposal(i, served.end) for i, served in self.served.items() if not served.answered])
        held = list(self.served)
        self.served.clear()
        self.proposer.release(held)

    def _send(self, proposals: list[Proposal]) -> None:
        by_link: dict[Link, list[Proposal]] = {}
        for proposal in proposals:
            if served := self.served.get(proposal.sequence_id):
                served.answered = True
                by_link.setdefault(served.link, []).append(proposal)
        for link, batch in by_link.items():
            self.counters.proposals += len(batch)
            self.counters.proposed_tokens += sum(len(p.tokens) for p in batch)
            link.send(proposal_batch_to_proto(batch))

    def stop(self) -> None:
        self.stopping.set()
        self.worker.join(timeout=5)
