"""Memory for KV off the device, and whether there is room for a pool: asked first, so that a refusal has numbers."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import psutil
import torch
from torch import Tensor

from triforce_core.errors import InvalidValueError, require
from triforce_core.kv.container import container_free

HOST = torch.device("cpu")
Place = torch.device | Path  # a device's memory, the host's among them, or the disk that a directory is on


def free_bytes(place: Place) -> int:
    """What may still be taken there, by anyone; of the host's memory, by this container."""
    if isinstance(place, Path):
        return shutil.disk_usage(place).free
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[0])
    available, limited = psutil.virtual_memory().available, container_free()
    return available if limited is None else min(available, limited)


def check_room(place: Place, num_bytes: int, setting: str, value: object, remedy: str) -> None:
    """Raise `InvalidValueError` naming `setting`, whose `value` makes a pool of KV this large, unless it fits."""
    free = free_bytes(place)
    rule = f"takes {gib(num_bytes)} for KV in {named(place)}, where {gib(free)} are free: {remedy}"
    require(num_bytes <= free, setting, value, rule)


def named(place: Place) -> str:
    if isinstance(place, Path):
        return f"a file in {place}"
    return "host memory" if place == HOST else f"the memory of {place}"


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def mapped(directory: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in a file of its own in `directory`, for pools beyond memory. The file loses its name at once: it lives
    as long as the tensor, and never longer than the process.

    Raises `InvalidValueError` where it cannot be made.
    """
    count = torch.Size(shape).numel()
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix="triforce-kv-") as file:
            # All of it now: writing to a hole of a full disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)
    except OSError as error:
        rule = f"must be a directory that can hold {gib(count * dtype.itemsize)}: {error.strerror}"
        raise InvalidValueError("target.offload_path", str(directory), rule) from None
