"""The longest context that a device has room for, roughly: the default of `triforce bench device`."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM
from transformers.configuration_utils import PretrainedConfig

from triforce_core.building.target_kv import bytes_per_token, offload_for
from triforce_core.config import Settings
from triforce_core.errors import require
from triforce_core.kv.base import KVGeometry
from triforce_core.kv.sizes import draft_window, retrieval_tail
from triforce_core.machine.device import DTYPES, torch_device
from triforce_core.machine.memory import free_bytes, gib, named
from triforce_core.models.files import context_length, kv_shape
from triforce_tools.bench.geometry import Geometry

LONGEST, STEP = 124_928, 1024  # tokens of prompt
PART = 0.9  # of what weights and small caches leave: for the KV of the target; the rest for passes and snapshots


def fitting_context(settings: Settings, geometry: Geometry, output: int, requests: int = 1) -> int:
    """The longest prompt, in whole steps, for which weights and caches should fit, with `requests` of them at once and
    room for `output` tokens after each. Raises `InvalidValueError` where not even the shortest fits.
    """
    settings = settings.model_copy(update={"max_sequences": requests})
    device, shape = torch_device(settings.device), kv_geometry_of(geometry.target, settings)
    prices = bytes_per_token(shape, offload_for(settings, shape.num_layers), settings)
    longest = min(LONGEST, context_length(geometry.target) - output)
    rule = f"leaves fewer than {STEP} of the geometry's {longest + output} positions: choose a larger geometry"
    require(longest >= STEP, "output", output, rule)
    for place, price in prices.items():
        before = weights_and_small_caches(settings, geometry) if place == device else 0
        free = free_bytes(place)
        fits = int((free - before) * PART // price // requests) - output
        rule = f"takes {gib(before)} without the target's KV in {named(place)}, where {gib(free)} are free"
        require(fits >= STEP, "geometry", geometry.target.model_type, f"{rule}: choose a smaller one")
        longest = min(longest, fits)
    return longest // STEP * STEP


def weights_and_small_caches(settings: Settings, geometry: Geometry) -> int:
    """The bytes of all weights, and of the caches of the lower tiers."""
    target = num_parameters(geometry.target)
    weights = (target + num_parameters(geometry.drafter)) * DTYPES[settings.dtype].itemsize
    weights += target if settings.retrieval.quantization else 0  # in bytes, and at most: a copy shares what it can
    sparse = settings.retrieval.budget + retrieval_tail(settings)  # of each sequence
    caches = kv_geometry_of(geometry.target, settings).bytes_per_token * sparse
    caches += kv_geometry_of(geometry.drafter, settings).bytes_per_token * draft_window(settings).capacity
    return weights + settings.max_sequences * caches


def kv_geometry_of(config: PretrainedConfig, settings: Settings) -> KVGeometry:
    return KVGeometry(*kv_shape(config), DTYPES[settings.dtype], torch_device(settings.device))


def num_parameters(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config).num_parameters())
