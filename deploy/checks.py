"""The checks of a start. `triforce serve` makes them before Ray starts, so that a mistake costs seconds and one line;
`triforce doctor` prints what each found, and also looks at the memory. A check returns what it found, or raises
`TriForceError`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from triforce_core.config import Settings
from triforce_core.errors import InvalidValueError, require
from triforce_core.machine.cores import keep_awake

if TYPE_CHECKING:
    from triforce_core.engine.limits import Limits

FRONT_END_CPUS = 0.1  # for the gateway, and for each replica's own process; the tiers do the work


def cpu(settings: Settings) -> str:
    """The CPU's instruction sets, and the cores to which the settings bind tiers."""
    from triforce_core.machine.cpu import cpu_summary

    allowed = os.sched_getaffinity(0)
    for group in settings.placement.groups:
        rule = f"must be among the cores that this process may use, {sorted(allowed)}"
        require(allowed.issuperset(group.cores or ()), f"placement.{group.tiers[0]}.cores", group.cores, rule)
    if request := keep_awake(settings.placement.cpu_latency_us):
        request.close()  # only a check that this machine permits the request; each tier makes its own later
    return f"{cpu_summary()}; {len(allowed)} cores; dtype {settings.dtype}"


def device(settings: Settings) -> str:
    import torch

    from triforce_core.machine.device import check_dtype, torch_device

    found = torch_device(settings.device)
    check_dtype(settings.dtype, found)
    seen = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    return f"{found}; PyTorch {torch.__version__} sees {', '.join(seen) or 'no GPU'}"


def ports(settings: Settings) -> str:
    check_ports(settings)
    server = settings.server
    return f"{server.port} (HTTP) and {server.grpc_port} (gRPC) are free on {server.host}"


def certificate(settings: Settings) -> str:
    from deploy.front import certificate_files, read_certificate

    files = certificate_files(settings.server)
    if files is None:
        return "none: HTTP and gRPC are not encrypted"
    read_certificate(*files)
    return str(files[0])


def keys(settings: Settings) -> str:
    from deploy.keys import keys_of

    keys_of(settings.server.api_keys)
    return settings.server.api_keys or "none: whoever reaches the ports may ask"


def models(settings: Settings) -> str:
    """Whether target and drafter are found, are supported, and share a vocabulary."""
    limits, lossy = check_models(settings), f"; LOSSY, {settings.target.lossy}" if settings.target.lossy else ""
    return (
        f"target {settings.target.model} (vocabulary of {limits.vocab_size}, context of {limits.context_length}"
        f" tokens), drafter {settings.draft.model}{lossy}"
    )


def weights(settings: Settings) -> str:
    """Whether the weights of all models are here, or to be downloaded, and can be read."""
    from safetensors import SafetensorError

    found = []
    for name, role in dict.fromkeys(models_of(settings).values()):
        try:
            count = parameters(name, role)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            rule = f"has no weights that can be read: {error}: copy its files again, whole (git lfs pull)"
            raise InvalidValueError(role, name, rule) from None
        found.append(f"{role} {name}: {'not downloaded yet' if count is None else f'{count / 1e6:.1f}M parameters'}")
    return "; ".join(found)


def memory(settings: Settings) -> str:
    """Whether the weights that are here fit what is free, by the container's limit where there is one. What they leave
    is for KV and passes, which the tiers measure when they start.

    No check of a start: on a CPU processes may share weights through the page cache, and on a GPU the question makes a
    CUDA context, which a server's own process should not keep.
    """
    from triforce_core.building.target_kv import offload_directory
    from triforce_core.machine.device import torch_device
    from triforce_core.machine.memory import free_bytes, gib, named

    offload_directory(settings.target.offload_path)
    place, needs = torch_device(settings.device), weight_bytes(settings)
    alone = any(group.gpus >= 1 for group in settings.placement.groups)
    needed = max(needs) if alone else settings.server.replicas.min * sum(needs)
    free = free_bytes(place)
    rule = f"take {gib(needed)} where {gib(free)} are free in {named(place)}: choose smaller models"
    require(needed < free, "target.model", f"the weights of {settings.target.model}", rule)
    return f"weights take {gib(needed)} of the {gib(free)} that are free in {named(place)}"


def placement(settings: Settings) -> str:
    """Whether this machine has the GPUs that the pipelines reserve. Only Ray knows about labels and other nodes."""
    import torch

    from actors.fit import Node, misfit
    from actors.placement import bundles

    where, copies = settings.placement, settings.server.replicas.min
    names = "; ".join(f"{group.name}{f' ({group.gpus:g} GPU a rank)' if group.gpus else ''}" for group in where.groups)
    if any(group.labels for group in where.groups):
        return f"{names}; only Ray knows which nodes have these labels"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = bundles(settings, FRONT_END_CPUS)
    # Ray is started with as many CPUs as are reserved, if the machine has fewer.
    cpus = max(os.cpu_count() or 1, copies * sum(each.get("CPU", 0.0) for each in wanted))
    reason = misfit(where, wanted, [Node({"CPU": cpus, "GPU": gpus}, {})], copies)
    require(reason is None, "placement", where.colocate, f"cannot be here: {reason}")
    return names


def traces(settings: Settings) -> str:
    """Whether the exporters that the environment names are installed."""
    from deploy.tracing import check

    return check()


Check = Callable[[Settings], str]
CHECKS: dict[str, Check] = {
    each.__name__: each for each in (cpu, device, ports, certificate, keys, traces, models, weights, placement)
}


def check_ports(settings: Settings) -> None:
    """Raise `InvalidValueError` unless both ports can be bound."""
    server = settings.server
    require(server.grpc_port != server.port, "server.grpc_port", server.grpc_port, "must not be server.port")
    host = server.host
    for field, port in (("port", server.port), ("grpc_port", server.grpc_port)):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except socket.gaierror as error:
                raise InvalidValueError(
                    "server.host", host, f"is no address of this machine: {error.strerror}"
                ) from None
            except OSError as error:
                reason = error.strerror or str(error)
                raise InvalidValueError(f"server.{field}", port, f"must be free on {host}: {reason.lower()}") from None


def check_models(settings: Settings) -> Limits:
    """The limits of what the target can serve. Raises, in one line, the errors with which the tiers would not start."""
    from triforce_core.attention import check_kernel
    from triforce_core.building.drafters import drafter_weights
    from triforce_core.engine.limits import target_limits
    from triforce_core.models.files import (
        check_pair,
        check_ranks,
        check_self_drafter,
        check_tokenizer,
        kv_shape,
        load_config,
        stop_token_ids,
    )

    drafter = None if settings.target.lossy else drafter_weights(settings)
    check_pair(settings.target.model, drafter)
    if settings.retrieval.model:
        check_self_drafter(settings.target.model, settings.retrieval.model)
    target = load_config(settings.target.model, "target")
    check_ranks(target, settings.target.model, settings.ranks(("target",)), "target.tensor_parallel")
    own, shared = settings.retrieval.model, settings.target.model
    lower = load_config(own, "self-drafter") if own else target
    check_ranks(lower, own or shared, settings.ranks(("retrieval",)), "retrieval.tensor_parallel")
    for config in (target, load_config(drafter, "drafter")) if drafter else (target,):
        check_kernel(settings, head_dim=kv_shape(config)[2])
    check_tokenizer(settings.target.model)
    stop_token_ids(settings.target.model)
    return target_limits(target, settings)


def models_of(settings: Settings) -> dict[str, tuple[str, str]]:
    """The name and the role of each tier's model; a drafter without a model is left out."""
    from triforce_core.building.drafters import drafter_weights

    found = {"target": (settings.target.model, "target")}
    if settings.target.lossy:
        return found
    own = settings.retrieval.model
    found["retrieval"] = found["target"] if own is None else (own, "self-drafter")
    if drafter := drafter_weights(settings):
        found["draft"] = (drafter, "drafter")
    return found


def weight_bytes(settings: Settings) -> list[int]:
    """What the weights that are here take in each process of a pipeline, the target's first; on GPUs, in each rank."""
    from triforce_core.machine.device import DTYPES

    models, needs = models_of(settings), []
    for group in settings.placement.groups:
        loaded = {models[tier]: settings.ranks((tier,)) for tier in group.tiers if tier in models}
        on_cpu = settings.device_type == "cpu"
        numbers = sum((parameters(*model) or 0) // (1 if on_cpu else ranks) for model, ranks in loaded.items())
        needs.append(numbers * DTYPES[settings.dtype].itemsize)
    return needs


def parameters(name: str, role: str) -> int | None:
    """The number of weights, by the headers of the files, which are all read; None for a hub id that is not downloaded.

    Raises `OSError`, `ValueError`, `KeyError` or `SafetensorError` for files that are missing or damaged.
    """
    from safetensors import safe_open

    from triforce_core.models.dequantise import weights_of
    from triforce_core.models.files import load_config, resolve, weight_files
    from triforce_core.models.gguf import count_weights, is_gguf

    if is_gguf(path := resolve(name, role)):
        return count_weights(path)
    shards = weight_files(name, role)
    downloaded = shards is not None and all(shard.exists() for shard in shards)
    if shards is None or not (downloaded or Path(path).is_dir()):
        return None
    count, config = 0, load_config(name, role)
    for shard in shards:
        with safe_open(shard, "numpy") as tensors:
            for key in tensors.keys():  # noqa: SIM118  # no dict
                count += weights_of(key, prod(tensors.get_slice(key).get_shape()), config)
    return count
