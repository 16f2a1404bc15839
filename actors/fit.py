"""Checks whether a cluster could hold a pipeline and, if not, gives the reason, so that users do not wait in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from triforce_core.config import PlacementSettings

Bundle = dict[str, float]  # Ray resources by name
SLACK = 1e-6  # tolerance for comparing amounts: sums of decimal fractions are inexact
NONE = -(2**30)  # table entry: these bundles find no nodes
MOST_CELLS = 10**7  # cells of the table, 40 MB
MOST_STEPS = 3 * 10**9  # cell updates, a few seconds; real clusters need a thousandth of them


@dataclass(frozen=True, slots=True)
class Node:
    """A node's labels, and its total resources, whether free or taken."""

    resources: Mapping[str, float]
    labels: Mapping[str, str]

    def suits(self, bundle: Bundle, labels: Mapping[str, str]) -> bool:
        return has_room(self.resources, bundle) and all(matches(self.labels.get(k), v) for k, v in labels.items())


def misfit(placement: PlacementSettings, bundles: list[Bundle], nodes: Sequence[Node], copies: int = 1) -> str | None:
    """The reason why the nodes, even if empty, could not hold `copies` pipelines of these bundles; None if they could.

    `bundles` holds one bundle for each group of the placement.
    """
    for group, bundle in zip(placement.groups, bundles, strict=True):
        if not any(node.suits(bundle, group.labels) for node in nodes):
            return f"no node has {shown(bundle, group.labels)} for {group.name}; {listed(nodes)}"
    if can_lay_out(placement, bundles, nodes, copies):
        return None
    pipelines = "a pipeline's processes" if copies == 1 else f"{copies} pipelines"
    each = "; ".join(f"{g.name}: {shown(b, g.labels)}" for g, b in zip(placement.groups, bundles, strict=True))
    return f"{placement.strategy} cannot lay out {pipelines} ({each}) over {listed(nodes)}"


def can_lay_out(placement: PlacementSettings, bundles: list[Bundle], nodes: Sequence[Node], copies: int) -> bool:
    """Whether the nodes have room for all bundles of `copies` pipelines; also True if finding out would take too long.

    Dynamic programming over the nodes. `beside` is int32 with one dimension for each kind of bundle but the last, of
    size wanted + 1. Its entry at (n1, n2, …) is the largest number of bundles of the last kind that fit on the nodes
    considered so far together with n1, n2, … bundles of the other kinds; it is negative if those do not fit.
    """
    kinds = kinds_of(placement, bundles)
    *wanted, wanted_last = [kind.each * copies for kind in kinds]
    # STRICT_SPREAD puts no two bundles of a pipeline on one node. Such a layout exists if and only if no node holds
    # more bundles than there are pipelines: bundles are the edges of a bipartite graph between kinds and nodes, and
    # assigning them to pipelines colours these edges (König 1916).
    most = copies if placement.strategy == "STRICT_SPREAD" else sum(wanted) + wanted_last
    rooms = [[min(kind.room(node), kind.each * copies, most) for kind in kinds] for node in nodes]
    cells = prod(count + 1 for count in wanted)
    if cells > MOST_CELLS or cells * sum(prod(count + 1 for count in room[:-1]) for room in rooms) > MOST_STEPS:
        return True
    beside = np.full([count + 1 for count in wanted], NONE, dtype=np.int32)
    beside[(0,) * len(wanted)] = 0
    for node, room in zip(nodes, rooms, strict=True):
        # A node may take more bundles of a kind than are still wanted. Then the count before it would be below 0, and
        # the padding has the value of count 0 there.
        before = np.pad(beside, [(count, 0) for count in room[:-1]], mode="edge") if wanted else beside.copy()
        for load, last in loads(kinds, node, room, most):
            left = tuple(slice(r - n, r - n + w + 1) for r, n, w in zip(room, load, wanted, strict=False))
            np.maximum(beside, before[left] + last, out=beside)
        if beside.flat[-1] >= wanted_last:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Kind:
    """Interchangeable bundles: they need the same resources and the same node labels."""

    bundle: Bundle
    labels: tuple[Mapping[str, str], ...]
    each: int = 1  # number of these bundles per pipeline

    def room(self, node: Node) -> int:
        """How many bundles of this kind the node could hold if it held nothing else."""
        return (
            count_fitting(self.bundle, node.resources) if all(node.suits({}, labels) for labels in self.labels) else 0
        )


def kinds_of(placement: PlacementSettings, bundles: list[Bundle]) -> list[Kind]:
    """The kinds of one pipeline's bundles, the most frequent kind last. With STRICT_PACK all bundles count as one."""
    labels = [group.labels for group in placement.groups]
    if placement.strategy == "STRICT_PACK":
        together = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for bundle in bundles for name in bundle}
        return [Kind(together, tuple(labels))]
    pairs = zip(bundles, labels, strict=True)
    alike = Counter((tuple(sorted(bundle.items())), tuple(sorted(wanted.items()))) for bundle, wanted in pairs)
    kinds = [Kind(dict(bundle), (dict(wanted),), each) for (bundle, wanted), each in alike.items()]
    return sorted(kinds, key=lambda kind: kind.each)


def loads(kinds: list[Kind], node: Node, room: list[int], most: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """The loads of a node: counts of all kinds but the last, and how many bundles of the last kind fit beside them.

    `room` is how many bundles of each kind alone fit on the node; `most` is the most bundles that it may hold in all.
    """
    for load in product(*(range(count + 1) for count in room[:-1])):
        taken = {
            name: sum(n * kind.bundle.get(name, 0.0) for n, kind in zip(load, kinds, strict=False))
            for name in node.resources
        }
        left = {name: amount - taken[name] for name, amount in node.resources.items()}
        if sum(load) <= most and has_room(left, dict.fromkeys(left, 0.0)):
            yield load, min(room[-1], most - sum(load), count_fitting(kinds[-1].bundle, left))


def count_fitting(bundle: Bundle, resources: Mapping[str, float]) -> int:
    """How many such bundles the resources suffice for."""
    return min(int((resources.get(name, 0.0) + SLACK) / amount) for name, amount in bundle.items() if amount)


def has_room(resources: Mapping[str, float], bundle: Bundle) -> bool:
    return all(resources.get(name, 0.0) >= amount - SLACK for name, amount in bundle.items())


def matches(label: str | None, selector: str) -> bool:
    """Whether a node's label satisfies a Ray label selector: v, !v, in(v,w), !in(v,w)."""
    wanted = selector.removeprefix("!")
    values = wanted[3:-1].replace(" ", "").split(",") if wanted.startswith("in(") else [wanted]
    return (label in values) != selector.startswith("!")


def shown(resources: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Resources and labels as text, such as `1 CPU, 0.5 GPU, ray.io/accelerator-type=H100`."""
    amounts = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources]
    return ", ".join(amounts + [f"{key}={value}" for key, value in labels.items()])


def listed(nodes: Sequence[Node]) -> str:
    """The nodes as text, such as `2 nodes (8 CPU, 1 GPU; 4 CPU)`."""
    known = [shown(n.resources, {k: v for k, v in n.labels.items() if k != "ray.io/node-id"}) for n in nodes[:8]]
    more = "; …" if len(nodes) > 8 else ""
    return f"{len(nodes)} node{'' if len(nodes) == 1 else 's'} ({'; '.join(known)}{more})"
