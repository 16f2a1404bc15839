"""Resolves `dtype: auto` on a cluster to one precision for all replicas, because tokens depend on the precision."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.fit import Node
from actors.placement import bundles, nodes
from triforce_core.config import Settings
from triforce_core.errors import UnavailableError
from triforce_core.models.precision import machine_dtype, resolved

log = logging.getLogger(__name__)

NODE_ID = "ray.io/node-id"  # a label that Ray sets on every node
TIMEOUT_S = 60.0  # for all nodes to start a process and answer


def dtypes_of(suitable: Sequence[Node]) -> list[str]:
    """The precision that suits each node's CPU. Raises `UnavailableError` if a node does not answer in time."""
    asked = []
    for node in suitable:
        where = NodeAffinitySchedulingStrategy(node.labels[NODE_ID], soft=False)
        task: Any = ray.remote(machine_dtype).options(num_cpus=0, scheduling_strategy=where)
        asked.append(task.remote("cpu"))
    try:
        found: list[str] = ray.get(asked, timeout=TIMEOUT_S)
    except GetTimeoutError:
        rule = f"{len(asked)} nodes that may hold a target did not all report their CPU within {TIMEOUT_S:g} s"
        raise UnavailableError(f"dtype: auto: {rule}; set dtype: float32 or bfloat16") from None
    return found


def agreed(settings: Settings, ask: Callable[[Sequence[Node]], list[str]] = dtypes_of) -> Settings:
    """The settings with a precision for `dtype: auto` that suits every node on which a target may be placed."""
    if settings.dtype != "auto":
        return settings
    group, bundle = settings.placement.groups[0], bundles(settings)[0]
    suitable = [node for node in nodes() if node.suits(bundle, group.labels)]
    # CUDA devices all have the same precision; a cluster that has yet to grow has no node to ask.
    if settings.device_type != "cpu" or not suitable:
        return resolved(settings)
    dtype = "bfloat16" if set(ask(suitable)) == {"bfloat16"} else "float32"
    log.info("dtype: auto is %s on the %d nodes that may hold a target", dtype, len(suitable))
    return settings.model_copy(update={"dtype": dtype})
