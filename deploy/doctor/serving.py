"""Checks of the models in the settings: whether they suit each other, have weights, and a place on this machine."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

from deploy.app import FRONT_END_CPUS, check_models
from deploy.doctor.finding import Finding, note, ok, problem
from triforce_core.config import Settings


def models(settings: Settings) -> Finding:
    """Whether target and drafter are found, are supported, and share a vocabulary."""
    from triforce_core.attention import kernel_for
    from triforce_core.models.files import kv_shape, load_config

    limits = check_models(settings)
    if settings.device_type == "cuda":
        kernel_for(settings, kv_shape(load_config(settings.target.model, "target"))[2])
    found = (
        f"target {settings.target.model} (vocabulary of {limits.vocab_size}, context of {limits.context_length} tokens,"
        f" KV for {limits.kv_pool_tokens}), drafter {settings.draft.model}"
    )
    if settings.target.lossy:
        return note(f"{found}: LOSSY, {settings.target.lossy}", "nothing, if that is meant; else target.eviction: none")
    if limits.kv_pool_tokens < limits.context_length:
        advice = f"raise target.kv_pool_tokens to {limits.context_length}, or lower target.context_length to the pool"
        return note(f"{found}: there is KV for less than one context", advice)
    return ok(found)


def weights(settings: Settings) -> Finding:
    """Whether the weights of all models are here and can be read."""
    from safetensors import SafetensorError

    found, to_come = [], []
    for name, role in dict.fromkeys(models_of(settings).values()):
        try:
            count = parameters(name, role)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            advice = "copy its *.safetensors files again, whole; in a git clone, git lfs pull"
            return problem(f"{role} {name} has no weights that can be read: {error}", advice)
        if count is None:
            to_come.append(name)
        found.append(f"{role} {name}: {'not downloaded yet' if count is None else f'{count / 1e6:.1f}M parameters'}")
    if to_come:
        advice = f"nothing, if the server may download them at start; otherwise hf download {to_come[0]}"
        return note("; ".join(found), advice)
    return ok("; ".join(found))


def models_of(settings: Settings) -> dict[str, tuple[str, str]]:
    """The name and the role of each tier's model; a drafter without a model is left out."""
    from triforce_core.engine.drafters import drafter_weights

    found = {"target": (settings.target.model, "target")}
    if settings.target.lossy:
        return found
    own = settings.retrieval.model
    found["retrieval"] = found["target"] if own is None else (own, "self-drafter")
    if drafter := drafter_weights(settings):
        found["draft"] = (drafter, "drafter")
    return found


def parameters(name: str, role: str) -> int | None:
    """The number of weights, by the headers of the files, which are all read; None for a hub id that is not downloaded.

    Raises `OSError`, `ValueError`, `KeyError` or `SafetensorError` for files that are missing or damaged.
    """
    from safetensors import safe_open

    from triforce_core.models.files import resolve, weight_files

    shards = weight_files(name, role)
    downloaded = shards is not None and all(shard.exists() for shard in shards)
    if shards is None or not (downloaded or Path(resolve(name, role)).is_dir()):
        return None
    count = 0
    for shard in shards:
        with safe_open(shard, "numpy") as tensors:
            count += sum(prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118  # no dict
    return count


def placement(settings: Settings) -> Finding:
    """Whether this machine has the GPUs that the pipelines reserve; Ray alone knows about labels, and about other
    nodes.
    """
    import torch

    from actors.fit import Node, misfit
    from actors.placement import bundles

    where, copies = settings.placement, settings.server.replicas.min
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = "; ".join(f"{group.name}{f' ({group.gpus:g} GPU a rank)' if group.gpus else ''}" for group in where.groups)
    processes = f"{len(where.groups)} process{'es' if len(where.groups) > 1 else ''}"
    found = f"{processes} a pipeline: {names}"
    labelled = {name: value for group in where.groups for name, value in group.labels.items()}
    if labelled:
        named = ", ".join(f"{name}: {value}" for name, value in labelled.items())
        advice = "compare them with the labels of your nodes: ray list nodes --detail"
        return note(f"{found}; only Ray knows whether a node has the labels {named}", advice)
    wanted = bundles(settings, FRONT_END_CPUS)
    # Ray is started with as many as are reserved, if the machine has fewer.
    cpus = max(os.cpu_count() or 1, copies * sum(each.get("CPU", 0.0) for each in wanted))
    reason = misfit(where, wanted, [Node({"CPU": cpus, "GPU": gpus}, {})], copies)
    if reason is not None:
        pipelines = f"{copies} pipeline{'s' if copies > 1 else ''} of {processes} ({names})"
        advice = "lower placement.<tier>.gpus or server.replicas.min, change placement.colocate or placement.strategy"
        return problem(f"this machine, with {gpus} GPUs, cannot hold {pipelines}: {reason}", advice)
    if settings.device == "cuda" and gpus > 1 and not any(group.gpus for group in where.groups):
        advice = "reserve a GPU for each tier: placement: {target: {gpus: 1}, retrieval: {gpus: 1}, draft: {gpus: 1}}"
        return note(f"{found}; all share the first of {gpus} GPUs", advice)
    return ok(found)
