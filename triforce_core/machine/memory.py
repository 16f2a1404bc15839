"""Memory for KV off the device, and checks for room before a pool is made, so that a refusal can give numbers."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from triforce_core.errors import InvalidValueError, require
from triforce_core.machine.cgroup import container_free

HOST = torch.device("cpu")
Place = torch.device | Path  # the memory of a device or the host, or the disk of a directory
CONTEXT = 512 << 20  # bytes that CUDA takes for a process by itself; H100, CUDA 13: about 500 MiB


@dataclass(frozen=True, slots=True)
class Share:
    """What the target's process may take of its device, or of the host's memory."""

    part: float = 1.0  # of the whole, for all processes of the pipeline that are there
    taken: int = 0  # the bytes that lower tiers in processes of their own have taken of that
    awaited: int = 0  # the bytes that they will need besides


WHOLE = Share()


def free_bytes(place: Place) -> int:
    """The bytes that are still free there; for host memory, at most those that this container may take."""
    if isinstance(place, Path):
        return shutil.disk_usage(place).free
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[0])
    available, limited = psutil.virtual_memory().available, container_free()
    return available if limited is None else min(available, limited)


def room(device: torch.device, share: Share) -> int:
    """The bytes that this process may still allocate on this GPU."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    if share.part < 1:  # not all of what is free, because others may not have taken their parts yet
        free = min(free, int(share.part * total) - taken_bytes(device) - share.taken)
    return free - share.awaited


def taken_bytes(device: torch.device) -> int:
    """The bytes of this GPU that this process takes."""
    return CONTEXT + torch.cuda.memory_reserved(device)


def check_room(
    place: Place, num_bytes: int, setting: str, value: object, remedy: str, beside: int = 0, free: int | None = None
) -> None:
    """Raise `InvalidValueError`, naming `setting`, unless `num_bytes` of KV and `beside` more for other things fit what
    is `free`, by default all that is free there.
    """
    free = free_bytes(place) if free is None else free
    more = f", and {gib(beside)} for snapshots and passes," if beside else ""
    rule = f"takes {gib(num_bytes)} for KV{more} in {named(place)}, where {gib(free)} are free: {remedy}"
    require(num_bytes + beside <= free, setting, value, rule)


def named(place: Place) -> str:
    if isinstance(place, Path):
        return f"a file in {place}"
    return "host memory" if place == HOST else f"the memory of {place}"


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def mapped(directory: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor in a new file in `directory`, for pools larger than memory. The file is unlinked at once, so that it
    disappears with the tensor, or with the process at the latest.

    Raises `InvalidValueError` if the file cannot be made.
    """
    count = torch.Size(shape).numel()
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix="triforce-kv-") as file:
            # Allocate the whole file now, because writing to a sparse file on a full disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)
    except OSError as error:
        rule = f"must be a directory that can hold {gib(count * dtype.itemsize)}: {error.strerror}"
        raise InvalidValueError("target.offload_path", str(directory), rule) from None
