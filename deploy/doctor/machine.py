"""Checks of the machine: CPU, GPUs, shared memory, disk and limits."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import psutil

from actors.cores import keep_awake
from deploy.doctor.finding import Finding, note, ok, problem
from triforce_core.config import Settings
from triforce_core.kv.container import container_free, groups
from triforce_core.models.cpu import CPUINFO, cpu_flags, cpu_summary
from triforce_core.models.precision import machine_dtype

FAST_PRODUCTS = {"avx2", "asimd"}  # CPU flags without one of which matrix products are slow
STORE_SHARE, STORE_BYTES = 0.3, 10**10  # Ray keeps its object store in /dev/shm if that holds the smaller of the two
MOST_FULL = 0.95  # on a fuller disk Ray refuses to spill objects
ENOUGH_FILES = 8192  # Ray's recommendation
RAY_RAISES_TO = 65536  # Ray raises the soft limit so far by itself, if the hard limit allows it
GET_PYTORCH = "https://pytorch.org/get-started/locally"


def cpu(settings: Settings, cpuinfo: Path = CPUINFO) -> Finding:
    """The CPU's instruction sets, and the precision that suits them."""
    fast, found = machine_dtype("cpu", cpuinfo), cpu_summary(cpuinfo)
    if settings.device_type != "cpu":
        return ok(found)
    if settings.dtype != "float32" and fast == "float32":
        slow = f"without bfloat16 instructions {settings.dtype} is many times slower than float32"
        return note(f"{found}: {slow}", "set dtype: auto or float32 (--dtype float32)")
    found += f": dtype auto is {fast} here" + ("" if settings.dtype == fast else f", and {settings.dtype} is set")
    flags = cpu_flags(cpuinfo)
    if flags and not FAST_PRODUCTS & flags:
        advice = "use a CPU with AVX2; if this is a virtual machine, let it see its host's CPU (QEMU: -cpu host)"
        return note(f"{found}; neither AVX2 nor NEON, so all passes are slow", advice)
    return ok(found)


def cores(settings: Settings, root: Path = Path("/")) -> Finding:
    """The cores that this process may use, the threads of a pass, and the cores to which the settings bind tiers."""
    from actors.placement import ENVIRONMENT

    allowed, quota = os.sched_getaffinity(0), cpu_quota(root)
    for group in settings.placement.groups:
        if group.cores and not allowed.issuperset(group.cores):
            found = f"{group.name} is bound to cores {list(group.cores)}, and this process may use {sorted(allowed)}"
            return problem(found, f"set placement.{group.tiers[0]}.cores to some of these, or leave it out")
    if request := keep_awake(settings.placement.cpu_latency_us):
        request.close()
    usable = max(1, min(len(allowed), int(quota or len(allowed))))
    most = max(len(group.cores or ()) or int(ENVIRONMENT["OMP_NUM_THREADS"]) for group in settings.placement.groups)
    threads = settings.threads or most
    limit = "" if quota is None else f", of which this container may use {quota:g}"
    found = f"{len(allowed)}{limit}; passes run on at most {threads} threads"
    if threads > usable and settings.device_type == "cpu":
        return note(f"{found}, more than can run at once", f"set threads: {usable} in the settings file")
    return ok(found)


def cpu_quota(root: Path) -> float | None:
    """The CPUs whose time this container may use, by the narrowest limit of its control groups (version 2)."""
    quotas = []
    for folder, _ in groups(root):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except OSError:
            continue
        if quota != "max":
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def gpu(settings: Settings) -> Finding:
    """The GPUs, their driver, and whether this build of PyTorch can use them."""
    import torch

    from triforce_core.models.device import check_dtype, torch_device

    build = f"PyTorch {torch.__version__} is built {for_cuda(torch.version.cuda)}"
    if not torch.cuda.is_available():
        return without_gpu(settings, build)
    found = f"{listed([described(index) for index in range(torch.cuda.device_count())])}; {build}"
    if driver := driver_gpus():
        found += f"; {driver[0].rpartition(', ')[2]}"
    if settings.device_type == "cpu":
        return note(f"{found}; device: cpu leaves it unused", "set device: cuda (--device cuda)")
    device = torch_device(settings.device)
    check_dtype(settings.dtype, device)
    major, minor = torch.cuda.get_device_capability(device)
    if not built_for(major, minor, torch.cuda.get_arch_list()):
        return problem(f"{found}, with no kernels for {major}.{minor}", f"install a build that has them: {GET_PYTORCH}")
    return ok(found)


def without_gpu(settings: Settings, build: str) -> Finding:
    """The finding where PyTorch sees no GPU: there is none, whether or not one is needed, or PyTorch cannot use it."""
    import torch

    wanted, driver = settings.device_type == "cuda", driver_gpus()
    if not driver and not wanted:
        return ok("none; device: cpu needs none")
    if not driver:
        advice = "install the NVIDIA driver, give the container its GPUs (docker run --gpus all), or set device: cpu"
        return problem(f"no NVIDIA driver answers here; {build}", advice)
    found = f"{listed(driver)}; PyTorch cannot use it: {build}"
    if torch.version.cuda is None:
        advice = f"install PyTorch's build for CUDA: {GET_PYTORCH}"
    elif (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        found, advice = f"{found}, and CUDA_VISIBLE_DEVICES is {visible!r}", "unset CUDA_VISIBLE_DEVICES"
    else:
        advice = f"update the NVIDIA driver, or install PyTorch's build for an older CUDA: {GET_PYTORCH}"
    return problem(found, advice) if wanted else note(f"{found}; device: cpu leaves it unused", advice)


def for_cuda(version: str | None) -> str:
    return "without CUDA" if version is None else f"for CUDA {version}"


def driver_gpus() -> list[str]:
    """A line for each GPU that the NVIDIA driver reports, with the driver's version; empty without a driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [", driver ".join(line.rsplit(", ", 1)) for line in answer.stdout.splitlines() if line.strip()]


def described(index: int) -> str:
    import torch

    has = torch.cuda.get_device_properties(index)
    return f"{has.name} ({has.total_memory / 2**30:.0f} GiB, compute capability {has.major}.{has.minor})"


def listed(gpus: list[str]) -> str:
    """The GPUs as text, alike ones as one."""
    return ", ".join(f"{count} × {each}" if count > 1 else each for each, count in Counter(gpus).items())


def built_for(major: int, minor: int, architectures: list[str]) -> bool:
    """Whether a build with these architectures (`sm_90`, `compute_90`) has kernels for this compute capability.

    Machine code runs on later minor versions of the same major version, intermediate code (`compute_`) on all later.
    """
    for each in architectures:
        kind, _, number = each.rstrip("af").partition("_")
        theirs = divmod(int(number), 10)
        if theirs <= (major, minor) and (theirs[0] == major or kind == "compute"):
            return True
    return False


def shared_memory(settings: Settings, path: Path = Path("/dev/shm")) -> Finding:
    """The room for Ray's object store, through which snapshots travel between processes."""
    if not path.is_dir():
        return note(f"there is no {path}: Ray's object store lies in files", "run on Linux for speed")
    free = psutil.disk_usage(str(path)).free
    limited = container_free()  # Ray counts what the container may use
    available = psutil.virtual_memory().available
    wanted = min(STORE_SHARE * (available if limited is None else min(limited, available)), STORE_BYTES)
    found = f"{size(free)} free"
    if free >= wanted or settings.placement.colocate == "all":
        return ok(found)
    advice = (
        f"give it {size(wanted)}: docker run --shm-size={wanted / 2**30:.0f}g; in Kubernetes an emptyDir of medium"
        " Memory; or delete what lies in it"
    )
    return note(f"{found}, too little for Ray's object store: snapshots travel through files", advice)


def disk(settings: Settings) -> Finding:
    """The folder of Ray's sessions, and that of KV with `offload: disk`; their sizes are a matter of `memory`."""
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    usage = shutil.disk_usage(folder)
    found = f"{size(usage.free)} free in {folder}, for Ray's logs"
    if usage.free < (1 - MOST_FULL) * usage.total:
        advice = f"delete what is not needed, such as old folders in {folder / 'ray'}, or set RAY_TMPDIR"
        return note(f"{found}: more than {MOST_FULL:.0%} are taken, so Ray would not spill objects", advice)
    if settings.target.offload != "disk" or settings.target.offload_path is None:
        return ok(found)
    place = Path(settings.target.offload_path)
    kind = file_system(place)
    found += f"; {size(shutil.disk_usage(place).free)} free in {place} ({kind}), for KV"
    if kind in ("tmpfs", "ramfs"):
        return note(f"{found}: that is memory", "set target.offload_path to a folder on an SSD, or offload: host")
    return ok(found)


def file_system(path: Path) -> str:
    """The kind of file system that holds `path`."""
    path = path.resolve()
    holding = [each for each in psutil.disk_partitions(all=True) if path.is_relative_to(each.mountpoint)]
    return max(holding, key=lambda each: len(each.mountpoint)).fstype if holding else "unknown"


def open_files(settings: Settings) -> Finding:
    """The files that a process may have open; each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (RAY_RAISES_TO if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    limit = max(soft, min(hard, RAY_RAISES_TO))
    found = f"at most {limit} a process"
    if limit >= ENOUGH_FILES:
        return ok(found)
    advice = "ulimit -Hn 65536 as root; docker run --ulimit nofile=65536:65536; systemd: LimitNOFILE=65536"
    return note(f"{found}, where Ray recommends {ENOUGH_FILES}: many clients at once may be refused", advice)


def size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
