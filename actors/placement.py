"""Placing the three tiers: one bundle of a placement group each, Ray's resources as the settings say."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.tiers import DraftActor, RetrievalActor, TargetActor, TierActor
from triforce_core.config import ServerSettings, Settings
from triforce_core.messages import Tier

# Several tiers share the cores of a small machine; threads that spin while they wait would starve one another.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
# Ray gives an actor with a share of a CPU one thread; how many are used is ours to say (settings, `threads`).
ENVIRONMENT["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))


@dataclass(frozen=True, slots=True)
class TierActors:
    """Handles of one pipeline's actors."""

    draft: ActorHandle[Any]
    retrieval: ActorHandle[Any]
    target: ActorHandle[Any]

    def all(self) -> dict[Tier, ActorHandle[Any]]:
        return {Tier.DRAFT: self.draft, Tier.RETRIEVAL: self.retrieval, Tier.TARGET: self.target}


def tier_bundle(server: ServerSettings) -> dict[str, float]:
    """The Ray resources of one tier."""
    bundle = {"CPU": server.tier_cpus, "GPU": server.tier_gpus}
    return {name: amount for name, amount in bundle.items() if amount} or {"CPU": 0.001}


def place_tiers(settings: Settings, group: PlacementGroup, first_bundle: int = 0) -> TierActors:
    """Create the actors in three consecutive bundles of `group`; they start loading when asked for their address.

    They know one another by name, so that a restarted one finds the others again.
    """
    pipeline = uuid.uuid4().hex[:8]
    names = {tier: f"triforce-{pipeline}-{tier.name.lower()}" for tier in Tier}

    def actor(cls: type[TierActor], bundle: int, *args: Any) -> ActorHandle[Any]:
        remote: Any = ray.remote(cls)
        handle: ActorHandle[Any] = remote.options(
            name=names[cls.tier],
            num_cpus=settings.server.tier_cpus,
            num_gpus=settings.server.tier_gpus,
            max_concurrency=4,
            max_restarts=0 if cls is TargetActor else -1,  # without a target there is nothing to go on with
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            runtime_env={"env_vars": ENVIRONMENT},
        ).remote(settings, *args)
        return handle

    draft = actor(DraftActor, first_bundle)
    retrieval = actor(RetrievalActor, first_bundle + 1, names[Tier.DRAFT])
    return TierActors(draft, retrieval, actor(TargetActor, first_bundle + 2, names[Tier.RETRIEVAL]))
