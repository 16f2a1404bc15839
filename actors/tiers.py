"""The three tier actors. Ray places and monitors them and restarts their processes; tokens pass over gRPC only.

Each is a plain class, which placement.py makes an actor, and holds the lower tiers in its own process unless it is
given the name of an actor below. Processes that only place the actors import this module too: what only a running actor
needs is imported inside the methods.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Sized
from contextlib import ExitStack
from io import FileIO
from typing import TYPE_CHECKING

import ray

from actors.admission import Address
from actors.links import LOOK_UP_S, RemoteProposer
from actors.marks import Marks
from actors.rank_actors import lead
from actors.serving import LinkServer, TierServer
from actors.wire import MAX_CONTEXT, NUM_TOKEN_IDS, Bounds
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core.building.drafters import Drafter, drafter_for, drafter_weights
from triforce_core.config import DeviceGroup, Settings
from triforce_core.doorbell import Doorbell
from triforce_core.errors import UnavailableError
from triforce_core.machine.cores import keep_awake, keep_to
from triforce_core.machine.cpu import usable_cores
from triforce_core.messages import Proposer, Tier
from triforce_core.speculation.decoder import SpeculativeDecoder, Verifier
from triforce_core.speculation.run_ahead import RunAhead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from actors.handover import Piece, RaySink, SnapshotReceiver
    from actors.sharing import Occupied
    from actors.target_server import AsyncServer
    from triforce_core.engine.engine import Engine
    from triforce_core.engine.limits import Limits
    from triforce_core.kv.retrieval import RetrievalKV
    from triforce_core.models.rank_group import Leader
    from triforce_core.models.runner import ModelRunner

CONNECT_TIMEOUT_S = 30.0
LOOPBACK = "127.0.0.1"


def address_of(name: str) -> Address:
    """The current address of the tier actor of this name. Waits up to `LOOK_UP_S` seconds if it restarts or loads."""
    return Address(*ray.get(ray.get_actor(name).start.remote(LOOK_UP_S), timeout=LOOK_UP_S))


class TierActor(ABC):
    """The common part of the three tier actors: one gRPC server, started once."""

    tier: Tier

    def __init__(self, settings: Settings) -> None:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        self.settings = settings
        self.server: LinkServer | AsyncServer | None = None
        self.link: RemoteProposer | None = None  # to the tier below, if that is in another process
        self.inner: dict[Tier, Sized] = {}  # the sequences that each lower tier in this process holds
        self.ranks: Leader | None = None  # set if this process leads others, each with a share of the models
        self.awake: FileIO | None = None  # the request of `keep_awake`, in force while this file is open
        self.runners: dict[Tier, ModelRunner] = {}  # by tier in this process, if the tier has a model
        self.starting = threading.Lock()
        self.undo = ExitStack()  # ends everything that a start has made so far

    def start(self, patience_s: float = -1) -> Address:
        """Load the models, serve, and return the address, whose port is new after every restart; later calls return the
        same. A call during another waits for it, at most `patience_s` seconds (-1: no limit). A start that fails leaves
        nothing behind. Raises `UnavailableError` if the other call takes too long.
        """
        from triforce_core.machine.threads import apart

        # The owner of the pipeline calls `start`, and so does the tier above.
        if not self.starting.acquire(timeout=patience_s):
            raise UnavailableError(f"the {self.tier.name.lower()} tier is still loading")
        try:
            if self.server is None:
                try:
                    self.server = apart(self._load_and_serve)
                except Exception:
                    self.undo.close()
                    raise
            return self.server.address
        finally:
            self.starting.release()

    def _load_and_serve(self) -> LinkServer | AsyncServer:
        from triforce_core.machine.threads import run_on

        self.undo.callback(self.forget)
        if self.group.cores is not None:
            keep_to(self.group.cores, f"placement.{self.tier.name.lower()}.cores")
        run_on(self.settings.threads or usable_cores())  # Ray sets one thread; passes choose their own
        self.awake = keep_awake(self.settings.placement.cpu_latency_us)
        if self.awake is not None:
            self.undo.enter_context(self.awake)
        world = self.settings.ranks(self.group.tiers)
        if world > 1:
            self.ranks = lead(world, self.settings.device)
            self.undo.callback(self.ranks.close)
        host = self.settings.server.tier_host
        return self.serve(ray.util.get_node_ip_address() if host == "node" else host or LOOPBACK)

    @property
    def group(self) -> DeviceGroup:
        """The group of tiers that this process holds."""
        name = self.tier.name.lower()
        return next(group for group in self.settings.placement.groups if name in group.tiers)

    @abstractmethod
    def serve(self, host: str) -> LinkServer | AsyncServer:
        """Load the models and serve at this host. Everything that must be closed explicitly goes to `undo` at once."""

    def forget(self) -> None:
        """Drop the references to everything that a start has made: models are freed with the last reference."""
        self.inner, self.runners = {}, {}
        self.link = self.ranks = self.awake = None

    @abstractmethod
    def tier_status(self) -> pb.TierStatus: ...

    def status(self) -> list[bytes]:
        """A serialized TierStatus of each tier in this process: Ray cannot pickle protobuf messages."""
        from triforce_core.building.inspection import kernels_of

        if self.server is None:
            return [pb.TierStatus(tier=name).SerializeToString() for name in self.group.tiers]
        own = self.tier_status()
        own.refused_calls = self.server.admission.refused
        if (link := self.link) is not None and link.too_silent:
            own.silent.MergeFrom(pb.SilentPeer(tier=link.peer, address=link.address.place, silent_s=link.silent_s))
        statuses = {self.tier: own} | {
            tier: pb.TierStatus(tier=tier.name.lower(), ready=own.ready, live_sequences=len(held))
            for tier, held in self.inner.items()
        }
        for tier, runner in self.runners.items():
            statuses[tier].threads = runner.threads.latest if runner.threads else 0
            statuses[tier].passes, statuses[tier].pass_s = runner.passes, runner.seconds
            statuses[tier].kernels.MergeFrom(pb.Kernels(**kernels_of(runner)))
        for status in statuses.values():
            status.address = self.server.address.place
        return [status.SerializeToString() for status in statuses.values()]

    def load(self, name: str, role: str, ranks: Leader | None = None) -> PreTrainedModel:
        """The model, or this rank's share if the model is divided over ranks."""
        from triforce_core.models.load import load_model

        settings = self.settings
        return load_model(name, role, settings.dtype, settings.device, ranks, settings.target.context_length)

    def connect(self, below: str, timeout_s: float, doorbell: Doorbell) -> RemoteProposer:
        """A link to the tier actor of this name. Waits a while for it, but returns even if it is not there yet."""
        peer = below.rpartition("-")[2]
        self.link = RemoteProposer(lambda: address_of(below), timeout_s=timeout_s, doorbell=doorbell, peer=peer)
        self.undo.callback(self.link.close)
        self.link.wait_ready(CONNECT_TIMEOUT_S)
        return self.link

    def own_drafter(self) -> Drafter:
        """The draft tier, held in this process."""
        weights = drafter_weights(self.settings)
        drafter = drafter_for(self.settings, None if weights is None else self.load(weights, "drafter"))
        if drafter.runner is not None:
            self.runners[Tier.DRAFT] = drafter.runner
        return drafter


class LinkedActor(TierActor):
    """A tier actor that serves the tier above over a link."""

    tier_server: TierServer  # set once the tier serves

    def occupied(self, patience_s: float) -> list[Occupied]:
        """What this process and those below have of their GPUs, once they have loaded, which may take `patience_s`."""
        from actors.sharing import occupied

        self.start(patience_s)
        return occupied(self.settings, self.group)

    def bounds(self) -> Bounds:
        """What this tier knows, once its models are loaded, of the text that it can be told."""
        sizes = [runner.model.config.vocab_size for runner in self.runners.values()]
        return Bounds(min(sizes, default=NUM_TOKEN_IDS), self.settings.target.context_length or MAX_CONTEXT)

    def serve_link(self, host: str, tier_server: TierServer) -> LinkServer:
        self.undo.callback(tier_server.stop)
        server = LinkServer(host, tier_server)
        self.tier_server = tier_server
        return server

    def tier_status(self) -> pb.TierStatus:
        return self.tier_server.status()


class DraftActor(LinkedActor):
    """The draft tier: by default a tiny model with a StreamingLLM window."""

    tier = Tier.DRAFT

    def proposer(self) -> Proposer:
        return self.own_drafter()

    def serve(self, host: str) -> LinkServer:
        proposer = self.proposer()
        return self.serve_link(host, TierServer(proposer, Tier.DRAFT, above=Tier.RETRIEVAL, bounds=self.bounds()))


class RetrievalActor(LinkedActor):
    """The retrieval tier. `draft`: the name of the draft actor; if empty, this process drafts itself."""

    tier = Tier.RETRIEVAL

    def __init__(self, settings: Settings, draft: str = "") -> None:
        super().__init__(settings)
        self.draft = draft
        self.snapshots: SnapshotReceiver | None = None

    def verifier(self) -> Verifier:
        from actors.handover import SnapshotReceiver
        from triforce_core.building.assembly import retrieval_kv, retrieval_verifier
        from triforce_core.building.loading import load_retrieval_model
        from triforce_core.models.replay import LeadingRetrievalKV

        model = load_retrieval_model(self.settings, self.ranks)
        own_kv = retrieval_kv(model, self.settings)
        kv: RetrievalKV | LeadingRetrievalKV
        kv = own_kv if self.ranks is None else LeadingRetrievalKV(own_kv, self.ranks)
        if self.ranks is not None:
            self.ranks.barrier()
        self.snapshots = SnapshotReceiver(
            kv, self.settings.device, self.settings.max_sequences, linked=lambda: bool(self.tier_server.links)
        )
        verifier = retrieval_verifier(model, kv, self.settings)
        self.runners[Tier.RETRIEVAL] = verifier.runner
        return verifier

    def serve(self, host: str) -> LinkServer:
        verifier, doorbell = self.verifier(), Doorbell()
        drafts, shares = self._drafts(doorbell)
        ended = self.snapshots.link_ended if self.snapshots is not None else lambda: None
        pipelined, bounds = self.settings.micro_batches > 1, self.bounds()
        decoder = SpeculativeDecoder(drafts, verifier, micro_batches=shares, hand_up_early=pipelined)
        if self.settings.speculation.run_ahead:
            ahead = RunAhead(decoder, fewer_than=self.settings.micro_batches)
            server = TierServer(ahead, self.tier, Tier.TARGET, doorbell, lambda: ahead.can_run_ahead, ended, bounds)
        else:
            server = TierServer(decoder, self.tier, Tier.TARGET, doorbell, link_ended=ended, bounds=bounds)
        return self.serve_link(host, server)

    def _drafts(self, doorbell: Doorbell) -> tuple[Proposer, int]:
        """The proposer of drafts, and the number of micro-batches: 1 if drafts and passes alternate in one process."""
        if not self.draft:
            drafter = self.own_drafter()
            self.inner[Tier.DRAFT] = drafter.held
            return drafter, 1
        # Shorter than the target's timeout for this tier, so that this tier does not look hung if the draft tier hangs.
        timeout_s = self.settings.server.link_timeout_s / 2
        return self.connect(self.draft, timeout_s, doorbell), self.settings.micro_batches

    def take_piece(self, piece: Piece) -> bool | None:
        """As `SnapshotReceiver.take_piece`, with a piece that Ray has fetched; refused until this tier serves."""
        return False if self.server is None or self.snapshots is None else self.snapshots.take_piece(piece)

    def occupied(self, patience_s: float) -> list[Occupied]:
        from actors.sharing import occupied

        self.start(patience_s)
        snapshot_bytes = self.settings.retrieval.budget * self.runners[Tier.RETRIEVAL].kv.geometry.bytes_per_token
        own, below = occupied(self.settings, self.group, snapshot_bytes), list[Occupied]()
        if self.draft:
            below = ray.get(ray.get_actor(self.draft).occupied.remote(patience_s), timeout=patience_s)
        return own + below

    def forget(self) -> None:
        super().forget()
        self.snapshots = None


class TargetActor(TierActor):
    """The target, and the engine that drives the tiers. `retrieval`: the actor below; if empty, all tiers are here."""

    tier = Tier.TARGET

    def __init__(self, settings: Settings, retrieval: str = "") -> None:
        super().__init__(settings)
        self.retrieval = retrieval
        self.sink: RaySink | None = None
        self.marks = Marks.create()

    def identity(self) -> tuple[int, tuple[int, ...], str]:
        """For the owner, on the same machine: the ids of this process and its followers, and where its marks are."""
        return os.getpid(), self.ranks.pids if self.ranks is not None else (), self.marks.path

    def serve(self, host: str) -> AsyncServer:
        from actors.target_server import AsyncServer, TargetServer
        from triforce_core.building.exactness import exact_fingerprint
        from triforce_core.building.fingerprint import target_fingerprint
        from triforce_core.building.inspection import audit_of
        from triforce_core.building.runners import grammars_for

        engine, fingerprint = self.engine(), target_fingerprint(self.settings)
        if not engine.inexact:
            fingerprint = exact_fingerprint(fingerprint, self.settings)
        grammars = grammars_for(self.settings, engine.limits.vocab_size)
        lookaheads = None if self.settings.controlled else self.settings.speculation.effective
        target_server = TargetServer(engine, lookaheads, grammars, audit_of(engine), fingerprint, self.marks)
        self.undo.callback(target_server.stop)
        server = AsyncServer(host, target_server)
        self.target_server = target_server
        return server

    def forget(self) -> None:
        super().forget()
        self.sink = None

    def engine(self) -> Engine:
        from actors.handover import sink_for
        from actors.sharing import share_above
        from triforce_core.building.assembly import target_engine
        from triforce_core.building.inspection import runners_of
        from triforce_core.building.target_kv import target_kv
        from triforce_core.models.replay import LeadingFullKV

        if not self.retrieval:
            return self._whole_chain()
        model, doorbell = self.load(self.settings.target.model, "target", self.ranks), Doorbell()
        link = self.connect(self.retrieval, self.settings.server.link_timeout_s, doorbell)
        kv = target_kv(model, self.settings, share_above(self.settings, self.retrieval), self.ranks)
        self.sink = sink_for(self.settings.retrieval, ray.get_actor(self.retrieval))
        engine = target_engine(
            model,
            self.settings,
            link,
            self.sink,
            kv=kv if self.ranks is None else LeadingFullKV(kv, self.ranks, gathered=True),
            micro_batches=self.settings.micro_batches,
            first_sequence_id=secrets.randbits(48),  # the other tiers may still hold sequences of an earlier target
            doorbell=doorbell,
        )
        self.runners = runners_of(engine)
        return engine

    def limits(self) -> Limits:
        """The limits of the requests that this target can serve."""
        return self.target_server.engine_thread.engine.limits

    def _whole_chain(self) -> Engine:
        """All tiers in this process. The retrieval tier takes snapshots directly, and shares weights where possible."""
        from triforce_core.building.inspection import held_of, runners_of
        from triforce_core.building.loading import load_local_engine
        from triforce_core.building.target_kv import part_of
        from triforce_core.machine.memory import Share

        # Requests may ask for drafts even if the settings do not.
        share = Share(part_of(self.settings))
        engine = load_local_engine(self.settings, drafting=True, ranks=self.ranks, share=share)
        self.inner = {tier: held for tier, held in held_of(engine).items() if tier != self.tier}
        self.runners = runners_of(engine)
        return engine

    def tier_status(self) -> pb.TierStatus:
        return self.target_server.status()
