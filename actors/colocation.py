"""What `placement.colocate: auto` is on one machine, and a line for operators of machines with few cores or GPUs."""

from triforce_core.config import COLOCATED, PlacementSettings, Settings, TierPlacement
from triforce_core.machine.cpu import usable_cores

PROCESSES = len(COLOCATED["none"])
INDIFFERENT = {"colocate", "cpu_latency_us", "cpus"}  # settings that do not say which tiers share a process


def arranged(settings: Settings) -> Settings:
    """The settings with `colocate: auto` replaced by what suits this machine.

    `all` where there are fewer CPU cores than tiers, or one GPU; `draft_with_retrieval` with two GPUs; else `none`. On
    GPUs each process reserves one. If the settings say more about the placement, micro-batches, ranks or which GPU,
    it is `none`.
    """
    placement = settings.placement
    if placement.colocate != "auto":
        return settings
    given = {name: getattr(placement, name) for name in placement.model_fields_set}
    one_each = (settings.speculation.micro_batches or 1) == settings.ranks(("target", "retrieval")) == 1
    free = one_each and settings.device in ("cpu", "cuda") and given.keys() <= INDIFFERENT
    on_gpus = settings.device == "cuda"
    units = units_of(settings) if free else PROCESSES
    given["colocate"] = "none" if units >= PROCESSES else "draft_with_retrieval" if on_gpus and units == 2 else "all"
    if free and on_gpus:
        given |= {tiers[0]: TierPlacement(gpus=1) for tiers in COLOCATED[given["colocate"]]}
    return settings.model_copy(update={"placement": PlacementSettings.model_validate(given)})


def units_of(settings: Settings) -> int:
    """For each replica, the cores that this process may use, or the GPUs of this machine."""
    if settings.device_type == "cpu":
        units = usable_cores()
    else:
        import torch

        units = torch.cuda.device_count()
    return units // settings.server.replicas.max


def why(settings: Settings) -> str:
    """What this machine's cores or GPUs mean for the placement, where they are fewer than the tiers; else empty."""
    groups, units = settings.placement.groups, units_of(settings)
    what = "cores" if settings.device_type == "cpu" else "GPUs"
    there = f"{what} for each replica: {units}"
    if units >= PROCESSES or any(group.cores for group in groups):
        return ""
    if len(groups) > max(1, units):
        return f"{there}, on which {len(groups)} processes take turns; one may be faster: placement.colocate: all"
    return f"{there}, too few for a process for each tier"
