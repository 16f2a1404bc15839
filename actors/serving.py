"""The lower end of a link: any Proposer behind a gRPC server, and the thread that drives it."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

from actors.links import CHANNEL_OPTIONS
from actors.wire import proposal_batch_to_proto, work_batch_from_proto
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import TierServicer
from triforce_core.doorbell import Doorbell
from triforce_core.errors import InvalidValueError
from triforce_core.messages import Proposal, Proposer, Tier, Work

log = logging.getLogger(__name__)

SERVER_OPTIONS = [*CHANNEL_OPTIONS, ("grpc.server.max_pending_requests", 10_000)]
POLL_S = 0.2
MAX_FAILURES = 5
T = TypeVar("T")


class GrpcServer:
    """A `grpc.aio` server on a loop and a thread of its own, so that a busy model never delays the wire."""

    def __init__(self, host: str, add_services: Callable[[grpc.aio.Server], None]) -> None:
        self.host, self.add_services = host, add_services
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="grpc", daemon=True)
        self.thread.start()
        self.server, self.address = self._run(self._start())

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=30)

    async def _start(self) -> tuple[grpc.aio.Server, str]:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        self.add_services(server)
        port = server.add_insecure_port(f"{self.host}:0")
        await server.start()
        return server, f"{self.host}:{port}"

    def stop(self, grace_s: float = 1.0) -> None:
        self._run(self.server.stop(grace_s))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(timeout=5)


class Link:
    """One stream from above: where its answers go, and which sequences came over it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.outgoing: asyncio.Queue[pb.ProposalBatch] = asyncio.Queue()
        self.sequence_ids: set[int] = set()

    def send(self, batch: pb.ProposalBatch) -> None:
        """From any thread."""
        self.loop.call_soon_threadsafe(self.outgoing.put_nowait, batch)


class TierServer(TierServicer):
    """Serves one Proposer. One worker thread drives it, as a Proposer wants; the gRPC loop only moves messages.

    The doorbell wakes the worker: for work from above, and where the proposer is a tier over a link, for answers too.
    """

    def __init__(
        self,
        proposer: Proposer,
        tier: Tier,
        above: Tier,
        doorbell: Doorbell | None = None,
        can_run_ahead: Callable[[], bool] = lambda: False,
    ) -> None:
        self.proposer, self.tier, self.doorbell = proposer, tier, doorbell or Doorbell()
        self.can_run_ahead = can_run_ahead  # whether to go on collecting while nobody waits
        self.inbox: queue.SimpleQueue[tuple[Link, list[Work], list[int]]] = queue.SimpleQueue()
        self.owners: dict[int, Link] = {}
        self.unanswered: set[int] = set()
        self.ends: dict[int, int] = {}  # where the last work of each sequence ended
        self.counters = pb.LinkCounters(link=f"{above.name.lower()}>{tier.name.lower()}")
        self.stopping = threading.Event()
        self.worker = threading.Thread(target=self._work, name=f"{tier.name.lower()}-worker", daemon=True)
        self.worker.start()

    # -- gRPC loop -----------------------------------------------------------------------------------------------------

    async def Propose(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Reads and writes by `context`: half the delay of iterators, which cost a task a message."""
        await context.send_initial_metadata(())
        link = Link(asyncio.get_running_loop())
        writer = asyncio.create_task(self._write(link, context))
        try:
            while (batch := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                self._take(link, batch)
        except InvalidValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            writer.cancel()
            self.inbox.put((link, [], sorted(link.sequence_ids)))
            self.doorbell.ring()

    def _take(self, link: Link, batch: pb.WorkBatch) -> None:
        work, released = work_batch_from_proto(batch)
        link.sequence_ids |= {w.span.sequence_id for w in work}
        link.sequence_ids.difference_update(released)
        self.counters.work_items += len(work)
        self.counters.work_tokens += sum(len(w.span.tokens) for w in work)
        self.counters.bytes_in += batch.ByteSize()
        self.inbox.put((link, work, released))
        self.doorbell.ring()

    async def _write(self, link: Link, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            batch = await link.outgoing.get()
            self.counters.bytes_out += batch.ByteSize()
            await context.write(batch)

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.TierStatus:
        return self.status()

    def status(self) -> pb.TierStatus:
        return pb.TierStatus(
            tier=self.tier.name.lower(),
            ready=self.worker.is_alive(),
            live_sequences=len(self.owners),
            links=[self.counters],
        )

    # -- worker thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        failures = 0
        while not self.stopping.is_set():
            try:
                self._take_messages()
                if self.unanswered or self.can_run_ahead():
                    self._send(self.proposer.collect(POLL_S))
                else:
                    self.doorbell.wait(POLL_S)
                failures = 0
            except Exception:
                failures += 1
                log.exception("%s tier: a round failed, %d in a row", self.tier.name.lower(), failures)
                try:
                    self._abandon()
                except Exception:
                    log.exception("%s tier: what it held cannot be given up", self.tier.name.lower())
                    failures = MAX_FAILURES
                if failures >= MAX_FAILURES:  # a broken device never heals: a new process may
                    os._exit(1)

    def _take_messages(self) -> None:
        while not self.inbox.empty():
            link, work, released = self.inbox.get_nowait()
            self.owners.update({w.span.sequence_id: link for w in work})
            self.unanswered |= {w.span.sequence_id for w in work}
            self.ends.update({w.span.sequence_id: w.span.end for w in work})
            if work:
                self.proposer.submit(work)
            if released:
                self._release([i for i in released if self.owners.get(i) in (link, None)])

    def _release(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self.owners.pop(sequence_id, None)
            self.ends.pop(sequence_id, None)
        self.unanswered.difference_update(sequence_ids)
        self.proposer.release(sequence_ids)

    def _abandon(self) -> None:
        """After a failed round: answer empty at once, so that nobody waits for us, and forget all sequences."""
        self._send([Proposal(i, self.ends[i]) for i in self.unanswered])
        held = list(self.owners)
        self.owners.clear()
        self.ends.clear()
        self.proposer.release(held)

    def _send(self, proposals: list[Proposal]) -> None:
        by_link: dict[Link, list[Proposal]] = {}
        for proposal in proposals:
            self.unanswered.discard(proposal.sequence_id)
            if link := self.owners.get(proposal.sequence_id):
                by_link.setdefault(link, []).append(proposal)
        for link, batch in by_link.items():
            self.counters.proposals += len(batch)
            self.counters.proposed_tokens += sum(len(p.tokens) for p in batch)
            link.send(proposal_batch_to_proto(batch))

    def stop(self) -> None:
        self.stopping.set()
        self.worker.join(timeout=5)
