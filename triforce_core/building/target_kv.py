"""The target's cache, on its device or offloaded as the settings say, after checking that there is room for it."""

import os
from pathlib import Path
from typing import Any

from transformers.configuration_utils import PretrainedConfig

from triforce_core.attention import chunk_sums_for, kernel_for
from triforce_core.building.working_memory import Beside, beside_pool
from triforce_core.config import Settings
from triforce_core.errors import require
from triforce_core.kv.base import KVGeometry
from triforce_core.kv.full import FullKV
from triforce_core.kv.offloaded import Offload, OffloadedKV
from triforce_core.kv.selectors import LANDMARKS
from triforce_core.machine.memory import HOST, check_room

FIELD = "target.kv_pool_tokens"


def target_kv(config: PretrainedConfig, geometry: KVGeometry, pool_tokens: int, settings: Settings) -> FullKV:
    """The target's cache. Raises `InvalidValueError`, with the bytes needed, the bytes free and a remedy, if it has no
    room beside what the target takes for other things.
    """
    kernel, offload = kernel_for(settings, geometry.head_dim), offload_for(settings, geometry.num_layers)
    check_pool(offload, geometry, pool_tokens, beside_pool(config, geometry, pool_tokens, settings))
    unit = settings.retrieval.chunk  # the chunks of shared texts are those of snapshots
    # Which KV a request finds depends on the requests before it, and so does how its tokens are rounded.
    shares = settings.target.prefix_cache and not settings.deterministic
    # What is kept of every chunk in the pool for the configured selector; None: nothing. A request that names another
    # selector has the landmarks for it computed at its cuts.
    landmark = LANDMARKS.get(settings.retrieval.selector)
    options: dict[str, Any] = {
        "unit": unit,
        "shares": shares,
        "landmark": landmark,
        "chunk_sums": chunk_sums_for(settings),
    }
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


def check_pool(offload: Offload | None, geometry: KVGeometry, pool_tokens: int, beside: Beside) -> None:
    """Check that each place has room for its part of the cache and what goes with it; pinned memory is the host's."""
    if offload is None:
        instead = "disk" if geometry.device == HOST else "host"
        remedy, num_bytes = f"lower it, or set target.offload: {instead}", geometry.bytes_per_token * pool_tokens
        check_room(geometry.device, num_bytes, FIELD, pool_tokens, remedy, beside.landmarks + beside.on_device)
        return
    on_device, elsewhere = offload.kv_bytes(geometry, pool_tokens)
    resident = beside.landmarks * offload.resident_layers // geometry.num_layers
    on_host = beside.landmarks - resident
    remedy = "lower it or target.resident_layers" if offload.resident_layers else "lower it"
    check_room(geometry.device, on_device, FIELD, pool_tokens, remedy, resident + beside.on_device)
    if offload.directory is not None:
        check_room(offload.directory, elsewhere, FIELD, pool_tokens, "lower it, or name another target.offload_path")
        here = geometry.device == HOST
        more = on_host + (resident + beside.on_device if here else 0)
        check_room(HOST, on_device if here else 0, FIELD, pool_tokens, remedy, more)
    elif geometry.device == HOST:
        more = on_host + resident + beside.on_device
        check_room(HOST, elsewhere + on_device, FIELD, pool_tokens, "lower it, or set target.offload: disk", more)
    else:
        check_room(HOST, elsewhere, FIELD, pool_tokens, "lower it, or set target.offload: disk", on_host)
