"""How tiers in processes of their own share a GPU: each reports what it has taken, and the target, which starts last,
takes the rest of what the pipeline reserves there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import ray
import torch
from ray.exceptions import RayError

from triforce_core.building.target_kv import part_of
from triforce_core.config import DeviceGroup, Settings
from triforce_core.machine.memory import Share, taken_bytes

PATIENCE_S = 20.0  # for a lower tier to report to a target that is started anew, which requests wait for
LOAD_S = 3600.0  # and at the first start, when all tiers load at the same time

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Occupied:
    """What one process has of a GPU."""

    device: str  # its unique id
    reserved: float  # the part of the GPU that Ray has reserved for this process; 0: none
    taken: int  # bytes
    awaited: int  # bytes that it will need besides


def occupied(settings: Settings, group: DeviceGroup, snapshot_bytes: int = 0) -> list[Occupied]:
    """What this process has of its GPU; an empty list on a CPU. `snapshot_bytes`: of a snapshot, if it receives any."""
    if settings.device_type != "cuda":
        return []
    device = torch.device(settings.device)
    # A snapshot of each sequence may be on its way. And if this process dies, the next one loads as this one did, which
    # takes more for a while if the weights are quantised.
    loading = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
    awaited = settings.max_sequences * snapshot_bytes + loading
    return [Occupied(id_of(device), group.gpus, taken_bytes(device), awaited)]


def share_above(settings: Settings, below: str) -> Share | None:
    """What a target may take of its device above the tier actor of this name; None if that actor does not report."""
    part = part_of(settings)
    if settings.device_type != "cuda" or settings.placement.groups[0].gpus >= 1:
        return Share(part)
    patience_s = PATIENCE_S if ray.get_runtime_context().was_current_actor_reconstructed else LOAD_S
    try:
        found: list[Occupied] = ray.get(ray.get_actor(below).occupied.remote(patience_s), timeout=patience_s)
    except (RayError, ValueError) as error:  # ValueError: no such actor
        log.warning("the KV pool has room for one context only: %s does not report its memory: %r", below, error)
        return None
    return share_of(part, id_of(torch.device(settings.device)), found)


def share_of(part: float, device: str, found: list[Occupied]) -> Share:
    """The share of a target to which `part` of the device belongs, with the parts of the lower tiers that are there."""
    here = [each for each in found if each.device == device]
    reserved = part + sum(each.reserved for each in here)
    return Share(min(1.0, reserved), sum(each.taken for each in here), sum(each.awaited for each in here))


def id_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
