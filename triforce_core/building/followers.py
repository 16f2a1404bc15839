"""Follower ranks of tensor parallelism: their whole life, and starting them as child processes."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess

import torch

from triforce_core.building.assembly import few_retrieval_tokens, retrieval_kv
from triforce_core.building.loading import load_retrieval_model
from triforce_core.building.runners import runner_for
from triforce_core.building.target_kv import part_of, target_kv
from triforce_core.building.trial import decoded_tokens
from triforce_core.config import Settings
from triforce_core.errors import require
from triforce_core.machine.memory import Share
from triforce_core.messages import Tier
from triforce_core.models.files import check_ranks, load_config
from triforce_core.models.load import load_model
from triforce_core.models.rank_group import Endpoint, Follower, Leader, Rendezvous, follow_leader
from triforce_core.models.replay import CallExecutor

STOP_TIMEOUT_S = 10.0


def follow(settings: Settings, tiers: tuple[str, ...], endpoint: Endpoint) -> None:
    """Run as a follower of the leader that holds these tiers, until the leader stops or ends."""
    follower = follow_leader(endpoint, settings.device)
    try:
        executor = executor_of(settings, tiers, follower)
    except Exception as error:
        follower.fail(error)
    try:
        executor.follow()
    except Exception as error:
        follower.abort(f"what its leader did has failed here: {error}")
    follower.close()


def executor_of(settings: Settings, tiers: tuple[str, ...], group: Follower) -> CallExecutor:
    """Load the models in the leader's order, allocate the KV caches, and capture graphs when the leader does."""
    target = retrieval = None
    if "target" in tiers:
        name, longest = settings.target.model, settings.target.context_length
        target = retrieval = load_model(name, "target", settings.dtype, settings.device, group, longest)
    if "retrieval" in tiers and (target is None or settings.retrieval.own_weights):
        retrieval = load_retrieval_model(settings, group)
    sparse = retrieval_kv(retrieval, settings) if retrieval is not None and "retrieval" in tiers else None
    if sparse is not None:
        group.barrier()
    executor = CallExecutor(group, None, sparse)
    # The leader's order again: capturing a pass runs it, and all ranks must run the same pass at the same time.
    if retrieval is not None and sparse is not None:
        executor.runners[Tier.RETRIEVAL] = runner_for(retrieval, sparse, settings, few_retrieval_tokens(settings))
    if target is not None:
        executor.full = target_kv(target, settings, Share(part_of(settings)), group)
        executor.runners[Tier.TARGET] = runner_for(target, executor.full, settings, decoded_tokens(settings))
    return executor


@contextmanager
def local_ranks(settings: Settings) -> Iterator[Leader | None]:
    """Make this process the leader of child processes, which end with it; yields None where one rank suffices."""
    world = settings.ranks(("target", "retrieval"))
    if world == 1:
        yield None
        return
    check_local(settings, world)
    rendezvous = Rendezvous(world)
    spawn = multiprocessing.get_context("spawn")
    children = [
        spawn.Process(target=be_child, args=(settings, rendezvous.endpoint(rank)), daemon=True)
        for rank in range(1, world)
    ]
    for child in children:
        child.start()
    try:
        leader = rendezvous.lead(settings.device)
        try:
            yield leader
            leader.stop()
        finally:
            leader.close()
    finally:
        end(children)


def check_local(settings: Settings, world: int) -> None:
    """Raise `InvalidValueError` for settings that these ranks cannot serve, before processes are started."""
    both = settings.ranks(("target",)), settings.ranks(("retrieval",))
    rule = f"must be target.tensor_parallel, {both[0]}, in one process"
    require(both[0] == both[1], "retrieval.tensor_parallel", both[1], rule)
    check_ranks(load_config(settings.target.model, "target"), settings.target.model, world, "target.tensor_parallel")
    if settings.device == "cuda":
        here = torch.cuda.device_count()
        require(here >= world, "target.tensor_parallel", world, f"needs {world} GPUs: {here} are here")


def be_child(settings: Settings, endpoint: Endpoint) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader handles Ctrl-C
    follow(settings, ("target", "retrieval"), endpoint)


def end(children: list[SpawnProcess]) -> None:
    for child in children:
        child.join(STOP_TIMEOUT_S)
        if child.is_alive():
            os.kill(child.pid or 0, signal.SIGKILL)
            child.join()
