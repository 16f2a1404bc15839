"""Ranks as Ray actors: if a tier is divided over several devices, its tier actor leads and rank actors follow. The
leader calls them through Ray once, to bring the ranks together; after that they communicate without Ray.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import ray
from ray.exceptions import GetTimeoutError

from triforce_core.config import DeviceGroup, Settings
from triforce_core.errors import UnavailableError
from triforce_core.machine.cores import keep_to

if TYPE_CHECKING:
    from triforce_core.models.rank_group import Endpoint, Leader

START_TIMEOUT_S = 60.0  # limit for Ray to start a rank's process


def rank_name(tier: str, rank: int) -> str:
    """The actor name of rank `rank` of the tier actor named `tier`."""
    return f"{tier}-rank{rank}"


class RankActor:
    """Follows the tier actor that calls it, one leader at a time. Its process ends when the leader's does."""

    def __init__(self, settings: Settings, group: DeviceGroup) -> None:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        self.settings, self.group = settings, group

    def follow(self, endpoint: Endpoint) -> None:
        """Repeat the leader's calls as the rank of `endpoint`; returns when the leader has stopped."""
        from triforce_core.building.followers import follow

        if self.group.cores is not None:
            keep_to(self.group.cores, f"placement.{self.group.tiers[0]}.cores")
        follow(self.settings, self.group.tiers, endpoint)


def lead(world: int, device: str) -> Leader:
    """Bring together the ranks of the calling tier actor, their leader. Raises `UnavailableError` if one is missing."""
    from triforce_core.models.rank_group import Rendezvous

    own = ray.get_runtime_context().get_actor_name()
    assert own is not None, "tier actors are found by name"
    followers = [ray.get_actor(rank_name(own, rank)) for rank in range(1, world)]
    for rank, follower in enumerate(followers, start=1):
        try:
            ray.get(follower.__ray_ready__.remote(), timeout=START_TIMEOUT_S)  # Ray may be restarting it
        except GetTimeoutError:
            ray.kill(follower, no_restart=False)
            raise UnavailableError(f"rank {rank} of {own} hangs and was killed") from None
    rendezvous = Rendezvous(world)
    for rank, follower in enumerate(followers, start=1):
        follower.follow.remote(rendezvous.endpoint(rank))
    return rendezvous.lead(device)
