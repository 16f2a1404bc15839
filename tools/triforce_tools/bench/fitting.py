"""The longest context that a device has room for: the default of `triforce bench device`."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM
from transformers.configuration_utils import PretrainedConfig

from triforce_core.building.target_kv import offload_for
from triforce_core.building.working_memory import beside_pool
from triforce_core.config import Settings
from triforce_core.errors import require
from triforce_core.kv.base import KVGeometry
from triforce_core.kv.sizes import draft_window, retrieval_tail
from triforce_core.machine.device import DTYPES, torch_device
from triforce_core.machine.memory import HOST, free_bytes, gib
from triforce_core.models.files import context_length, kv_shape
from triforce_tools.bench.geometry import Geometry

LONGEST, STEP = 124_928, 1024  # tokens of prompt
HOST_SHARE = 0.9  # of the host's free memory, for KV that is offloaded
SPARED = 0.02  # share of the free memory that is left unused, for the gaps between allocations


def fitting_context(settings: Settings, geometry: Geometry, output: int, requests: int = 1) -> int:
    """The longest prompt, in whole steps, for which weights, caches and passes fit, with `requests` of them at once and
    room for `output` tokens after each; offloaded KV must fit the host's memory. Raises `InvalidValueError` where not
    even the shortest fits.
    """
    settings = settings.model_copy(update={"max_sequences": requests})
    device = torch_device(settings.device)
    free = int(free_bytes(device) * (1 - SPARED))
    left = free - weights_and_small_caches(settings, geometry)
    positions = context_length(geometry.target)
    longest = min(LONGEST, positions - output)
    rule = f"leaves fewer than {STEP} of the geometry's {positions} positions for a prompt: choose a larger geometry"
    require(longest >= STEP, "output", output, rule)
    for context in range(longest - longest % STEP, 0, -STEP):
        tokens = requests * (context + output)
        elsewhere = device == HOST or host_bytes(settings, geometry.target, tokens) <= free_bytes(HOST) * HOST_SHARE
        if elsewhere and pool_bytes(settings, geometry.target, tokens) <= left:
            return context
    needed = free - left + pool_bytes(settings, geometry.target, requests * (STEP + output))
    rule = f"takes {gib(needed)} with {STEP} tokens of context, where {gib(free)} are free on {device}"
    require(False, "geometry", geometry.target.model_type, f"{rule}: choose a smaller one")
    return 0


def weights_and_small_caches(settings: Settings, geometry: Geometry) -> int:
    """The bytes of all weights, and of the caches of the lower tiers."""
    # The retrieval tier's quantised copy is made in full precision first.
    copies = 2 if settings.retrieval.quantization else 1
    weights = copies * num_parameters(geometry.target) + num_parameters(geometry.drafter)
    sparse = settings.retrieval.budget + retrieval_tail(settings)  # of each sequence
    caches = kv_geometry_of(geometry.target, settings).bytes_per_token * sparse
    caches += kv_geometry_of(geometry.drafter, settings).bytes_per_token * draft_window(settings).capacity
    return weights * DTYPES[settings.dtype].itemsize + settings.max_sequences * caches


def pool_bytes(settings: Settings, config: PretrainedConfig, pool_tokens: int) -> int:
    """The bytes that the target's KV takes on the device, and those that the target needs beside it (`beside_pool`)."""
    shape = kv_geometry_of(config, settings)
    offload, beside = offload_for(settings, shape.num_layers), beside_pool(config, shape, pool_tokens, settings)
    if offload is None:
        return shape.bytes_per_token * pool_tokens + beside.landmarks + beside.on_device
    on_device, elsewhere = offload.kv_bytes(shape, pool_tokens)
    on_host = shape.device == HOST and offload.directory is None
    return on_device + (elsewhere if on_host else 0) + beside.landmarks + beside.on_device


def host_bytes(settings: Settings, config: PretrainedConfig, pool_tokens: int) -> int:
    """The bytes of KV that the target keeps in the host's memory instead of the device's."""
    shape = kv_geometry_of(config, settings)
    offload = offload_for(settings, shape.num_layers)
    return 0 if offload is None or offload.directory is not None else offload.kv_bytes(shape, pool_tokens)[1]


def kv_geometry_of(config: PretrainedConfig, settings: Settings) -> KVGeometry:
    return KVGeometry(*kv_shape(config), DTYPES[settings.dtype], torch_device(settings.device))


def num_parameters(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config).num_parameters())
