"""Whether a cluster could hold a pipeline, and if not, why: what to tell people before they wait for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np

from triforce_core.config import PlacementSettings

Bundle = dict[str, float]  # Ray resources by name
SLACK = 1e-6  # of amounts, which are sums of decimal fractions
NONE = -(2**30)
MOST_CELLS = 10**7  # of a table of 40 MB
MOST_STEPS = 3 * 10**9  # of cells: a few seconds; real clusters take a thousandth of it


@dataclass(frozen=True, slots=True)
class Node:
    """A node as placing sees it: all that it has, whether it is free or not."""

    resources: Mapping[str, float]
    labels: Mapping[str, str]

    def suits(self, bundle: Bundle, labels: Mapping[str, str]) -> bool:
        return has_room(self.resources, bundle) and all(matches(self.labels.get(k), v) for k, v in labels.items())


def misfit(placement: PlacementSettings, bundles: list[Bundle], nodes: Sequence[Node], copies: int = 1) -> str | None:
    """Why the nodes could not hold `copies` pipelines of these bundles even if they were empty; None where they could.

    One bundle for each of the placement's groups.
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
    """Whether `copies` pipelines find nodes for all their bundles; True as well where to say so would take minutes.

    Node after node, by what each can take. `beside` [wanted of each kind but the last, from 0 on] is how many of the
    last kind the nodes so far have room for beside so many of the others; negative where these find none.
    """
    kinds = kinds_of(placement, bundles)
    *wanted, wanted_last = [kind.each * copies for kind in kinds]
    # No two bundles of a pipeline on one node: that can be had if and only if no node has more bundles than there are
    # pipelines. Bundles are the edges of a graph between kinds and nodes, and pipelines colour them (König 1916).
    most = copies if placement.strategy == "STRICT_SPREAD" else sum(wanted) + wanted_last
    rooms = [[min(kind.room(node), kind.each * copies, most) for kind in kinds] for node in nodes]
    cells = prod(count + 1 for count in wanted)
    if cells > MOST_CELLS or cells * sum(prod(count + 1 for count in room[:-1]) for room in rooms) > MOST_STEPS:
        return True
    beside = np.full([count + 1 for count in wanted], NONE, dtype=np.int32)
    beside[(0,) * len(wanted)] = 0
    for node, room in zip(nodes, rooms, strict=True):
        # What is asked of this node and the ones before it may be less than what it takes.
        before = np.pad(beside, [(count, 0) for count in room[:-1]], mode="edge") if wanted else beside.copy()
        for load, last in loads(kinds, node, room, most):
            left = tuple(slice(r - n, r - n + w + 1) for r, n, w in zip(room, load, wanted, strict=False))
            np.maximum(beside, before[left] + last, out=beside)
        if beside.flat[-1] >= wanted_last:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Kind:
    """Bundles that any node takes for one another."""

    bundle: Bundle
    labels: tuple[Mapping[str, str], ...]
    each: int = 1  # of a pipeline

    def room(self, node: Node) -> int:
        """How many of it a node holds that holds nothing else."""
        return (
            count_fitting(self.bundle, node.resources) if all(node.suits({}, labels) for labels in self.labels) else 0
        )


def kinds_of(placement: PlacementSettings, bundles: list[Bundle]) -> list[Kind]:
    """Of one pipeline's bundles, the most frequent kind last. Those that must be on one node are a single bundle."""
    labels = [group.labels for group in placement.groups]
    if placement.strategy == "STRICT_PACK":
        together = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for bundle in bundles for name in bundle}
        return [Kind(together, tuple(labels))]
    pairs = zip(bundles, labels, strict=True)
    alike = Counter((tuple(sorted(bundle.items())), tuple(sorted(wanted.items()))) for bundle, wanted in pairs)
    kinds = [Kind(dict(bundle), (dict(wanted),), each) for (bundle, wanted), each in alike.items()]
    return sorted(kinds, key=lambda kind: kind.each)


def loads(kinds: list[Kind], node: Node, room: list[int], most: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """What a node holds at the same time: for each number of every kind but the last, the most of the last."""
    for load in product(*(range(count + 1) for count in room[:-1])):
        taken = {
            name: sum(n * kind.bundle.get(name, 0.0) for n, kind in zip(load, kinds, strict=False))
            for name in node.resources
        }
        left = {name: amount - taken[name] for name, amount in node.resources.items()}
        if sum(load) <= most and has_room(left, dict.fromkeys(left, 0.0)):
            yield load, min(room[-1], most - sum(load), count_fitting(kinds[-1].bundle, left))


def count_fitting(bundle: Bundle, resources: Mapping[str, float]) -> int:
    """How many times they hold it."""
    return min(int((resources.get(name, 0.0) + SLACK) / amount) for name, amount in bundle.items() if amount)


def has_room(resources: Mapping[str, float], bundle: Bundle) -> bool:
    return all(resources.get(name, 0.0) >= amount - SLACK for name, amount in bundle.items())


def matches(label: str | None, selector: str) -> bool:
    """Whether a node's label satisfies a Ray label selector: v, !v, in(v,w), !in(v,w)."""
    wanted = selector.removeprefix("!")
    values = wanted[3:-1].replace(" ", "").split(",") if wanted.startswith("in(") else [wanted]
    return (label in values) != selector.startswith("!")


def shown(resources: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """Such as `1 CPU, 0.5 GPU, ray.io/accelerator-type=H100`."""
    amounts = [f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources]
    return ", ".join(amounts + [f"{key}={value}" for key, value in labels.items()])


def listed(nodes: Sequence[Node]) -> str:
    """Such as `2 nodes (8 CPU, 1 GPU; 4 CPU)`."""
    known = [shown(n.resources, {k: v for k, v in n.labels.items() if k != "ray.io/node-id"}) for n in nodes[:8]]
    more = "; …" if len(nodes) > 8 else ""
    return f"{len(nodes)} node{'' if len(nodes) == 1 else 's'} ({'; '.join(known)}{more})"
