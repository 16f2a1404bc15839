"""The check of memory: whether weights and KV fit into what is free, by the container's limit where there is one."""

from __future__ import annotations

import psutil

from deploy.doctor.finding import Finding, note, ok, problem
from deploy.doctor.serving import models_of, parameters
from triforce_core.config import DeviceGroup, Settings

SMALLER = "lower target.kv_pool_tokens, retrieval.budget or max_sequences, or choose smaller models"
# Host memory beside weights and KV, as measured with the demo pair on a CPU: of each process of a pipeline, its replica
# included; and of Ray, the gateway and the command itself.
PROCESS_BYTES, SERVER_BYTES = 410 * 2**20, 1280 * 2**20


def memory(settings: Settings) -> Finding:
    """Compares what the processes of the pipelines take with what is free. Raises `InvalidValueError`, with a remedy,
    if the target's KV alone does not fit.
    """
    from triforce_core.kv.container import container_free
    from triforce_core.kv.memory import HOST, free_bytes, gib, named
    from triforce_core.models.device import torch_device

    place, copies = torch_device(settings.device), settings.server.replicas.min
    needs = [(group, process_bytes(settings, group)) for group in settings.placement.groups]
    needed, more = on_one_gpu(needs, copies), 0
    if place == HOST:
        ranks = copies * sum(settings.ranks(group.tiers) for group, _ in needs)
        needed = copies * sum(settings.ranks(group.tiers) * each for group, each in needs)
        more = (ranks + copies) * PROCESS_BYTES + SERVER_BYTES
    free, limited = free_bytes(place), container_free()
    by_limit = place == HOST and limited is not None and limited < psutil.virtual_memory().available
    found = f"{gib(free)} free in {named(place)}{' by the limit of this container' if by_limit else ''}"
    found += f"; weights and KV take {gib(needed)}" + (f", the processes some {gib(more)} more" if more else "")
    if needed > free:
        return problem(found, SMALLER)
    if needed + more > free:
        return note(f"{found}: the kernel may end processes", f"{SMALLER}, or free memory")
    return ok(found)


def on_one_gpu(needs: list[tuple[DeviceGroup, int]], copies: int) -> int:
    """The most bytes that one GPU must hold: those of one process, or of all processes that reserve no whole GPU."""
    whole = [each for group, each in needs if group.gpus >= 1]
    shared = sum(each for group, each in needs if group.gpus < 1)
    unreserved = not any(group.gpus for group, _ in needs)  # then all pipelines use the first GPU
    return max([*whole, shared * (copies if unreserved else 1)])


def process_bytes(settings: Settings, group: DeviceGroup) -> int:
    """The bytes of weights and KV that one rank of the group takes: on its device, and in host memory if that is its
    device. Weights count as not quantised, since they are loaded so; those not downloaded yet count as nothing.
    """
    from triforce_core.models.device import DTYPES

    models, own = models_of(settings), settings.retrieval.own_weights
    tiers = [tier for tier in group.tiers if tier in models]
    # Tiers of one process share weights, unless they are changed for the retrieval tier.
    loaded = {(*models[tier], tier == "retrieval" and own): settings.ranks((tier,)) for tier in tiers}
    item_bytes = DTYPES[settings.dtype].itemsize
    weights = sum((parameters(name, role) or 0) * item_bytes // ranks for (name, role, _), ranks in loaded.items())
    return weights + sum(kv_bytes(settings, tier, *models[tier]) for tier in tiers)


def kv_bytes(settings: Settings, tier: str, name: str, role: str) -> int:
    """The bytes of a tier's KV on one rank: on its device, and in host memory if that is its device."""
    from triforce_core.engine.cache_sizes import draft_heavy_hitters, draft_window, retrieval_tail
    from triforce_core.engine.limits import target_limits
    from triforce_core.engine.lossy import lossy_bytes
    from triforce_core.engine.target_kv import check_pool, offload_for
    from triforce_core.engine.working_memory import beside_pool
    from triforce_core.kv.base import KVGeometry
    from triforce_core.kv.memory import HOST
    from triforce_core.models.device import DTYPES, torch_device
    from triforce_core.models.files import kv_shape, load_config

    config = load_config(name, role)
    layers, kv_heads, head_dim = kv_shape(config)
    device = torch_device(settings.device)
    geometry = KVGeometry(layers, kv_heads // settings.ranks((tier,)), head_dim, DTYPES[settings.dtype], device)
    heads = config.num_attention_heads
    if tier == "draft" and settings.draft.cache == "heavy_hitter":
        return settings.max_sequences * draft_heavy_hitters(settings).bytes_each(geometry, heads)
    if tier == "draft":
        return geometry.bytes_per_token * settings.max_sequences * draft_window(settings).capacity
    if tier == "retrieval":
        return (
            geometry.bytes_per_token * settings.max_sequences * (settings.retrieval.budget + retrieval_tail(settings))
        )
    if settings.target.lossy:
        return settings.max_sequences * lossy_bytes(geometry, heads, settings)
    pool, offload = target_limits(config, settings).kv_pool_tokens, offload_for(settings, layers)
    beside = beside_pool(config, geometry, pool, settings)
    check_pool(offload, geometry, pool, beside)
    if offload is None:
        return geometry.bytes_per_token * pool + beside.landmarks
    on_device, elsewhere = offload.kv_bytes(geometry, pool)
    resident = beside.landmarks * offload.resident_layers // layers
    in_host = beside.landmarks - resident + (elsewhere if offload.directory is None else 0)
    return on_device + resident + (in_host if device == HOST else 0)
