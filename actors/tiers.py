"""The three tier actors. Ray places, restarts and monitors them; tokens pass between them over gRPC only.

Each is a plain class, made an actor in placement.py. `start` is idempotent: it loads the model once and returns the
address at which the tier serves, on a port that is new after every restart.

Whoever places the actors imports this module too; what loads torch is imported where the actors do their work.
"""

from __future__ import annotations

import logging
import secrets
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import ray

from actors.links import RemoteProposer
from actors.serving import GrpcServer, TierServer
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import add_TargetServicer_to_server, add_TierServicer_to_server
from triforce_core.config import Settings
from triforce_core.doorbell import Doorbell
from triforce_core.messages import Tier
from triforce_core.run_ahead import RunAhead

if TYPE_CHECKING:
    from actors.handover import PackedSnapshot

CONNECT_TIMEOUT_S = 30.0


def address_of(name: str) -> str:
    """Where the tier actor of this name serves now; waits while Ray restarts it."""
    return str(ray.get(ray.get_actor(name).start.remote()))


class TierActor(ABC):
    """What the three have in common: one gRPC server, started once."""

    tier: Tier

    def __init__(self, settings: Settings) -> None:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        self.settings = settings
        self.server: GrpcServer | None = None
        self.starting = threading.Lock()

    def start(self) -> str:
        """Load, serve, and return the address. Safe to call again, and while it runs."""
        with self.starting:  # the owner of the pipeline calls it, and so does the tier above
            if self.server is None:
                host = self.settings.server.tier_host
                self.server = self.serve(ray.util.get_node_ip_address() if host == "node" else host)
            return self.server.address

    @abstractmethod
    def serve(self, host: str) -> GrpcServer: ...

    @abstractmethod
    def tier_status(self) -> pb.TierStatus: ...

    def status(self) -> bytes:
        """A serialized TierStatus: Ray cannot pickle protobuf messages."""
        return self.tier_status().SerializeToString()


class DraftActor(TierActor):
    """The tiny model with its StreamingLLM window."""

    tier = Tier.DRAFT

    def serve(self, host: str) -> GrpcServer:
        from triforce_core.engine.assembly import draft_proposer
        from triforce_core.models.load import load_model

        model = load_model(self.settings.draft.model, "drafter", self.settings.dtype, self.settings.device)
        self.tier_server = TierServer(draft_proposer(model, self.settings), Tier.DRAFT, above=Tier.RETRIEVAL)
        return GrpcServer(host, lambda server: add_TierServicer_to_server(self.tier_server, server))

    def tier_status(self) -> pb.TierStatus:
        return self.tier_server.status()


class RetrievalActor(TierActor):
    """The target's weights over sparse snapshots of its KV."""

    tier = Tier.RETRIEVAL

    def __init__(self, settings: Settings, draft: str) -> None:
        super().__init__(settings)
        self.draft = draft

    def serve(self, host: str) -> GrpcServer:
        from triforce_core.engine.assembly import retrieval_decoder, retrieval_kv
        from triforce_core.models.load import load_model

        own = self.settings.retrieval.model
        name, role = (own, "self-drafter") if own else (self.settings.target.model, "target")
        model = load_model(name, role, self.settings.dtype, self.settings.device)
        self.kv = retrieval_kv(model, self.settings)
        # Shorter than the target's patience with us, so that a hung draft tier does not make us look hung too.
        timeout_s = self.settings.server.link_timeout_s / 2
        doorbell, speculation = Doorbell(), self.settings.speculation
        self.link = RemoteProposer(lambda: address_of(self.draft), timeout_s=timeout_s, doorbell=doorbell)
        self.link.wait_ready(CONNECT_TIMEOUT_S)
        micro_batches = speculation.micro_batches
        decoder = retrieval_decoder(model, self.kv, self.link, self.settings, micro_batches=micro_batches)
        proposer = RunAhead(decoder, below=micro_batches) if speculation.run_ahead else decoder
        self.tier_server = TierServer(proposer, Tier.RETRIEVAL, above=Tier.TARGET, doorbell=doorbell)
        return GrpcServer(host, lambda server: add_TierServicer_to_server(self.tier_server, server))

    def take_snapshot(self, packed: PackedSnapshot) -> None:
        """Called by the target's hand-over, with an object that Ray has fetched by then."""
        from actors.handover import unpack

        self.kv.deliver(unpack(packed, self.settings.device))

    def tier_status(self) -> pb.TierStatus:
        return self.tier_server.status()


class TargetActor(TierActor):
    """The target with its full KV, and the engine that drives the chain."""

    tier = Tier.TARGET

    def __init__(self, settings: Settings, retrieval: str) -> None:
        super().__init__(settings)
        self.retrieval = retrieval

    def serve(self, host: str) -> GrpcServer:
        from actors.handover import ObjectStoreSink
        from actors.target_server import TargetServer
        from triforce_core.engine.assembly import target_engine
        from triforce_core.models.load import load_model

        model = load_model(self.settings.target.model, "target", self.settings.dtype, self.settings.device)
        doorbell, timeout_s = Doorbell(), self.settings.server.link_timeout_s
        self.link = RemoteProposer(lambda: address_of(self.retrieval), timeout_s=timeout_s, doorbell=doorbell)
        self.link.wait_ready(CONNECT_TIMEOUT_S)
        engine = target_engine(
            model,
            self.settings,
            self.link,
            ObjectStoreSink(ray.get_actor(self.retrieval)),
            micro_batches=self.settings.speculation.micro_batches,
            first_sequence_id=secrets.randbits(48),  # the other tiers may still hold those of a target before us
            doorbell=doorbell,
        )
        self.target_server = TargetServer(engine, self.settings.speculation.effective)
        return GrpcServer(host, lambda server: add_TargetServicer_to_server(self.target_server, server))

    def tier_status(self) -> pb.TierStatus:
        return self.target_server.status()
