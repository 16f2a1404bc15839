"""What a container may still take of a machine's memory, by the files that tell of its control groups."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from triforce_core.errors import InvalidValueError
from triforce_core.machine import memory
from triforce_core.machine.cgroup import container_free
from triforce_core.machine.memory import HOST, check_room, free_bytes

GIB = 2**30
UNLIMITED = 9223372036854771712  # what version 1 has in place of no limit


def group(folder: Path, **files: object) -> None:
    """A control group with these files, `.` in a name written `_`; memory.stat from a dict."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        text = "\n".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        (folder / name.replace("memory_", "memory.", 1)).write_text(f"{text}\n")


def v2(folder: Path, limit: object, usage: int, **stat: int) -> None:
    group(folder, memory_max=limit, memory_current=usage, memory_stat={"anon": usage, **stat})


def v1(folder: Path, limit: int, usage: int, **stat: int) -> None:
    group(folder, memory_limit_in_bytes=limit, memory_usage_in_bytes=usage, memory_stat={"cache": 1, **stat})


def process(root: Path, *lines: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("\n".join(lines) + "\n")
    return root / "sys/fs/cgroup"


def test_version_2(tmp_path: Path) -> None:
    """Most containers are like this: their own group is the root of what they see. Cached files count as free, because
    they can be dropped.
    """
    at = process(tmp_path, "0::/")
    v2(at, 8 * GIB, 5 * GIB, inactive_file=2 * GIB, active_file=GIB, shmem=GIB)
    assert container_free(tmp_path) == 6 * GIB


def test_the_narrowest_of_all_levels_counts(tmp_path: Path) -> None:
    at = process(tmp_path, "0::/kube.slice/pod/one")
    group(at)  # the root of the machine has no limit, and no such files
    v2(at / "kube.slice", "max", 60 * GIB)
    v2(at / "kube.slice/pod", 4 * GIB, 3 * GIB)
    v2(at / "kube.slice/pod/one", 16 * GIB, 2 * GIB)
    assert container_free(tmp_path) == GIB
    v2(at / "kube.slice/pod", "max", 3 * GIB)
    assert container_free(tmp_path) == 14 * GIB


def test_version_1(tmp_path: Path) -> None:
    """Each controller has a folder, or shares one with others. A process is told its path on the machine, while what is
    mounted may be its own group.
    """
    at = process(tmp_path, "5:cpu,cpuacct:/docker/1f", "4:hugetlb,memory:/docker/1f", "0::/docker/1f") / "memory"
    v1(at, 8 * GIB, 7 * GIB, inactive_file=5, total_inactive_file=GIB, total_active_file=2 * GIB)
    assert container_free(tmp_path) == 4 * GIB
    v1(at / "docker/1f", 2 * GIB, GIB)
    assert container_free(tmp_path) == GIB


def test_no_limit_limits_nothing(tmp_path: Path) -> None:
    assert container_free(tmp_path) is None, "no Linux"
    at = process(tmp_path, "4:memory:/", "0::/../..", "1:name=systemd:/x")
    assert container_free(tmp_path) is None, "nothing is mounted"
    v1(at / "memory", UNLIMITED, 7 * GIB)
    v2(at / "unified", "max", GIB)
    free = container_free(tmp_path)
    assert free is not None
    assert free > psutil.virtual_memory().total
    (at / "unified/memory.max").write_text("what is this")
    assert container_free(tmp_path) is not None, "the others count"


def test_more_than_there_may_be_is_nothing_free(tmp_path: Path) -> None:
    v2(process(tmp_path, "0::/"), GIB, 2 * GIB)
    assert container_free(tmp_path) == 0


def test_a_pool_beyond_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine itself has room for the pool. But the kernel would kill the process as it fills the pool."""
    v2(process(tmp_path, "0::/"), 300 * 2**20, 200 * 2**20)
    monkeypatch.setattr(memory, "container_free", lambda: container_free(tmp_path))
    assert free_bytes(HOST) == 100 * 2**20
    check_room(HOST, 100 * 2**20, "target.kv_pool_tokens", 1, "lower it")
    with pytest.raises(
        InvalidValueError, match=r"takes 0.20 GiB for KV in host memory, where 0.10 GiB are free: lower it"
    ):
        check_room(HOST, 200 * 2**20, "target.kv_pool_tokens", 1, "lower it")
