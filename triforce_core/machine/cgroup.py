"""How much memory a container may still take, by the limits of its control groups.

The machine's count of free memory ignores these limits, but the kernel kills processes that exceed them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CgroupVersion:
    """Where a version of control groups keeps its files, and the names of the files."""

    mounts: tuple[str, ...]
    limit: str
    usage: str
    cache: tuple[str, ...]  # lines of memory.stat: cached files, which the kernel drops when memory is needed


V1 = CgroupVersion(
    ("sys/fs/cgroup/memory",),
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
V2 = CgroupVersion(
    ("sys/fs/cgroup", "sys/fs/cgroup/unified"), "memory.max", "memory.current", ("inactive_file", "active_file")
)


def container_free(root: Path = Path("/")) -> int | None:
    """The bytes that this container may still take; None without a limit. Cached files count as free, as they do in a
    machine's available memory.

    `root` is the folder that contains `proc` and `sys`.
    """
    free = [free_of(folder, version) for folder, version in groups(root)]
    return min((max(0, each) for each in free if each is not None), default=None)


def groups(root: Path) -> Iterator[tuple[Path, CgroupVersion]]:
    """The groups of this process, and all groups above them; the narrowest limit counts."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = V1 if controllers else V2
        for mount in version.mounts:
            # In a container the mount itself may be the process's group, although its path on the machine is longer.
            below = Path(path.lstrip("/"))
            for folder in (below, *below.parents) if ".." not in below.parts else (Path(),):
                yield root / mount / folder, version


def free_of(folder: Path, version: CgroupVersion) -> int | None:
    """The bytes free in one group; None if it has no limit or does not exist."""
    try:
        limit = (folder / version.limit).read_text().strip()
        if limit == "max":
            return None
        usage = int((folder / version.usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(limit) - usage + sum(int(stat.get(name, 0)) for name in version.cache)
    except (OSError, ValueError):
        return None
