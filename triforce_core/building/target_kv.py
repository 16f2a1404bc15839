"""The target's cache, on its device or offloaded as the settings say, as large as the settings say or as there is room
for.
"""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from triforce_core.attention import chunk_sums_for, kernel_for
from triforce_core.building.trial import working_bytes
from triforce_core.config import Settings
from triforce_core.engine.limits import target_limits
from triforce_core.errors import InvalidValueError, require
from triforce_core.kv.base import KVGeometry
from triforce_core.kv.full import FullKV
from triforce_core.kv.landmarks import example
from triforce_core.kv.offloaded import Offload, OffloadedKV
from triforce_core.kv.selectors import LANDMARKS
from triforce_core.machine.memory import HOST, WHOLE, Place, Share, check_room, free_bytes, named, room
from triforce_core.models.fallback import out_of_memory
from triforce_core.models.load import kv_geometry
from triforce_core.models.rank_group import Group

GAPS = 0.15  # by how much more than is measured a pool whose size is not set leaves free, for gaps between allocations
HOST_PART = 0.5  # of the host's free memory: the most that such a pool takes, because other processes grow, too


def target_kv(
    model: PreTrainedModel, settings: Settings, share: Share | None = WHOLE, group: Group | None = None
) -> FullKV:
    """The target's cache, of `target.kv_pool_tokens`. If this is not set, its size is one context with offload, and
    without offload what there is room for, but at least one context. To be made last of all that this process puts on
    the device. `share`: the part of the device that it may take; None: unknown, which allows one context. With a group,
    all ranks make pools of one size at the same time.

    Raises `InvalidValueError`, with the bytes needed, the bytes free and a remedy, if there is no room for it and for
    what the target takes beside it.
    """
    geometry, context = kv_geometry(model), target_limits(model.config, settings).context_length
    offload, asked = offload_for(settings, geometry.num_layers), settings.target.kv_pool_tokens
    prices, device, unit = bytes_per_token(geometry, offload, settings), geometry.device, settings.retrieval.chunk
    field, tokens = ("target.kv_pool_tokens", asked) if asked else ("target.context_length", context)
    for place, price in prices.items():
        check_room(place, price * tokens, field, tokens, remedy(place, device, offload))
    if group is not None:
        group.barrier()  # passes of the trial run on all ranks at once, and have a time limit
    part, kv = share.part / settings.ranks(("target",)) if share else 0.0, None
    if device == HOST:
        most = int(min(free_bytes(HOST) * HOST_PART * part // prices[HOST], settings.max_sequences * context))
    else:
        length = min(tokens, context)
        try:
            kv = new_kv(geometry, length, settings, offload)
            working = working_bytes(model, kv, length, settings)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            rule = f"leaves too little of {named(device)} for passes and cuts: {remedy(device, device, offload)}"
            raise InvalidValueError(field, tokens, rule) from None
        free = room(device, share or WHOLE) + prices[device] * length
        check_room(device, prices[device] * tokens, field, tokens, remedy(device, device, offload), working, free)
        most = (free - int((1 + GAPS) * working)) // prices[device]
    if asked is None and offload is None and share is not None:
        tokens = max(tokens, most // unit * unit)
    if group is not None:
        tokens = group.least(tokens)
    if kv is None or kv.allocator.num_slots < tokens:
        kv = None  # frees it first
        kv = new_kv(geometry, tokens, settings, offload)
    return kv


def part_of(settings: Settings) -> float:
    """The part of its GPU, or of the host's memory, that is for a process with the target, by what it reserves. What
    reserves nothing shares with all replicas.
    """
    reserved = settings.placement.groups[0].gpus if settings.device_type == "cuda" else 0.0
    return min(1.0, reserved or 1 / settings.server.replicas.max)


def bytes_per_token(geometry: KVGeometry, offload: Offload | None, settings: Settings) -> Mapping[Place, int]:
    """What a token of the pool takes in each place: its KV, and its part of what is kept of its chunk for the
    configured selector, which lies where the KV does, but for a file, in the host's memory.
    """
    landmark, chunk = LANDMARKS.get(settings.retrieval.selector), settings.retrieval.chunk
    kept = example(landmark, chunk, geometry).nbytes // chunk if landmark else 0  # of a layer
    resident = geometry.num_layers if offload is None else offload.resident_layers
    on_device, elsewhere = (geometry.bytes_per_token, 0) if offload is None else offload.kv_bytes(geometry, 1)
    prices = Counter[Place]({geometry.device: on_device + kept * resident})
    if offload is not None:
        prices[HOST] += kept * (geometry.num_layers - resident)
        prices[offload.directory or HOST] += elsewhere
    return prices


def remedy(place: Place, device: torch.device, offload: Offload | None) -> str:
    """What to do where the pool does not fit `place`."""
    if isinstance(place, Path):
        return "lower it, or name another target.offload_path"
    if offload is None or (place == HOST and offload.directory is None):
        return f"lower it, or set target.offload: {'disk' if place == HOST else 'host'}"
    return "lower it or target.resident_layers" if offload.resident_layers else "lower it"


def new_kv(geometry: KVGeometry, pool_tokens: int, settings: Settings, offload: Offload | None) -> FullKV:
    """A cache of this size."""
    options: dict[str, Any] = {
        "unit": settings.retrieval.chunk,  # the chunks of shared texts are those of snapshots
        # Which KV a request finds depends on the requests before it, and so does how its tokens are rounded.
        "shares": settings.target.prefix_cache and not settings.deterministic,
        # What is kept of every chunk in the pool for the configured selector; None: nothing. A request that names
        # another selector has the landmarks for it computed at its cuts.
        "landmark": LANDMARKS.get(settings.retrieval.selector),
        "chunk_sums": chunk_sums_for(settings),
        "in_blocks": not settings.inexact,
    }
    kernel = kernel_for(settings, geometry.head_dim)
    if offload is None:
        return FullKV(geometry, pool_tokens, kernel, **options)
    return OffloadedKV(geometry, pool_tokens, kernel, offload, **options)


def offload_for(settings: Settings, num_layers: int) -> Offload | None:
    """Where KV goes that does not stay on the device; None: all stays. Raises `InvalidValueError` for the directory."""
    target = settings.target
    if target.offload == "none" or target.resident_layers == num_layers:
        return None
    return Offload(target.resident_layers, offload_directory(target.offload_path))


def offload_directory(path: str | None) -> Path | None:
    if path is None:
        return None
    writable = os.path.isdir(path) and os.access(path, os.W_OK)
    require(writable, "target.offload_path", path, "must be a directory that can be written to")
    return Path(path)
