"""Places a pipeline: for each group of tiers in the settings, one bundle of a placement group and the actors in it."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.fit import Bundle, Node, misfit
from actors.rank_actors import RankActor, rank_name
from actors.tiers import LOOPBACK, DraftActor, RetrievalActor, TargetActor, TierActor
from triforce_core.config import DeviceGroup, PlacementSettings, Settings
from triforce_core.errors import UnavailableError
from triforce_core.machine.cpu import allowed_cores, usable_cores
from triforce_core.messages import Tier

ENVIRONMENT = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
# On a small machine several processes share cores, so threads that spin while waiting would starve other threads. Those
# of a process that has the cores to itself spin: a token takes a fifth less time (docs/decisions/0030).
SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}

ACTORS: dict[str, type[TierActor]] = {"draft": DraftActor, "retrieval": RetrievalActor, "target": TargetActor}


@dataclass(frozen=True, slots=True)
class TierActors:
    """Handles of one pipeline's actors; tiers that share a process share a handle."""

    draft: ActorHandle[Any]
    retrieval: ActorHandle[Any]
    target: ActorHandle[Any]
    followers: tuple[ActorHandle[Any], ...] = ()  # ranks 1 and up of the tiers that are divided over devices

    def all(self) -> dict[Tier, ActorHandle[Any]]:
        return {Tier.DRAFT: self.draft, Tier.RETRIEVAL: self.retrieval, Tier.TARGET: self.target}

    def each(self) -> list[ActorHandle[Any]]:
        """Every tier actor once, the target last."""
        return list(dict.fromkeys(self.all().values()))


def bundles(settings: Settings, beside_target: float = 0.0) -> list[Bundle]:
    """The resources that a pipeline reserves: one bundle for each group of the placement. The first, the target's, has
    room for `beside_target` more CPUs. The ranks of a tier share a bundle, because a bundle is on one node.
    """
    found = []
    for index, group in enumerate(settings.placement.groups):
        ranks = settings.ranks(group.tiers)
        cpus = round(ranks * group.cpus + (0.0 if index else beside_target), 4)
        bundle = {name: amount for name, amount in (("CPU", cpus), ("GPU", ranks * group.gpus)) if amount}
        found.append(bundle or {"CPU": 0.001})  # Ray accepts no empty bundle
    return found


def label_selectors(placement: PlacementSettings) -> list[dict[str, str]]:
    """For each bundle, the labels that its node must have."""
    return [group.labels for group in placement.groups]


def reserve(settings: Settings, timeout_s: float = 60.0) -> PlacementGroup:
    """A ready placement group, which the caller removes. Raises `UnavailableError`, with the reason, without room."""
    placement = settings.placement
    group: PlacementGroup = placement_group(
        bundles(settings), strategy=placement.strategy, bundle_label_selector=label_selectors(placement)
    )
    if group.wait(int(timeout_s)):
        return group
    remove_placement_group(group)
    reason = misfit(placement, bundles(settings), nodes()) or "what it needs is there, and taken"
    raise UnavailableError(f"no place for the pipeline within {timeout_s:g} s: {reason}")


def place_tiers(
    settings: Settings, group: PlacementGroup, actors: Mapping[str, type[TierActor]] = ACTORS, *more: Any
) -> TierActors:
    """Create, for each group of tiers, a tier actor and its follower ranks in the bundle of the same index in the
    placement group, which must be ready. The actors load when `start` is called, and find one another by name, even
    after a restart. `actors` maps the uppermost tier of a process to its class; `more` are arguments after the settings
    and names.
    """
    pipeline = uuid.uuid4().hex[:8]
    placed: dict[str, ActorHandle[Any]] = {}
    followers: list[ActorHandle[Any]] = []
    groups = settings.placement.groups
    settings = reachable(settings, len(nodes_of(group, len(groups))))
    names = [f"triforce-{pipeline}-{each.tiers[0]}" for each in groups]
    for index, each in reversed(list(enumerate(groups))):
        name, below = names[index], names[index + 1 : index + 2]
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        for rank in range(1, settings.ranks(each.tiers)):
            followers.append(create(RankActor, settings, each, rank_name(name, rank), where, each))
        handle = create(actors[each.tiers[0]], settings, each, name, where, *below, *more)
        placed.update(dict.fromkeys(each.tiers, handle))
    return TierActors(**placed, followers=tuple(followers))


def nodes_of(group: PlacementGroup, num_bundles: int) -> set[str]:
    """The nodes of the group's first `num_bundles` bundles; the first also holds the replica's process."""
    placed: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return {placed[index] for index in range(num_bundles)}


def reachable(settings: Settings, num_nodes: int) -> Settings:
    """The settings with `tier_host` set: unless given, it is the loopback on one node, else each node's own address."""
    if settings.server.tier_host is not None:
        return settings
    host = LOOPBACK if num_nodes == 1 else "node"
    return settings.model_copy(update={"server": settings.server.model_copy(update={"tier_host": host})})


def alone(settings: Settings) -> bool:
    """Whether one process holds all tiers of the only replica, on CPU cores of whose time it has no mere share."""
    [group, *others] = settings.placement.groups
    one = not others and settings.ranks(group.tiers) == settings.server.replicas.max == 1
    return one and settings.device_type == "cpu" and group.cores is None and usable_cores() == allowed_cores()


def create(
    cls: type[TierActor] | type[RankActor], settings: Settings, group: DeviceGroup, name: str, where: Any, *more: Any
) -> ActorHandle[Any]:
    """Create an actor of the group with this name; `more` are its arguments after the settings."""
    # Without this option Ray 2.60 aborts an actor when a transfer to it fails. Only `ray.remote` accepts the option,
    # `options` below does not.
    options: dict[str, Any] = {"enable_tensor_transport": True} if settings.retrieval.transport == "rdt" else {}
    remote: Any = ray.remote(**options)(cls) if options else ray.remote(cls)
    handle: ActorHandle[Any] = remote.options(
        name=name,
        num_cpus=group.cpus,
        num_gpus=group.gpus,
        max_concurrency=4,
        max_restarts=-1,
        scheduling_strategy=where,
        runtime_env={"env_vars": ENVIRONMENT if alone(settings) else ENVIRONMENT | SHARED_CORES},
    ).remote(settings, *more)
    return handle


def nodes() -> list[Node]:
    """The live nodes of the cluster that this process is connected to."""
    return [Node(each["Resources"], each.get("Labels", {})) for each in ray.nodes() if each["Alive"]]
