"""Whether a cluster could hold a pipeline, and if not, why: what to tell people before they wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triforce_core.config import PlacementSettings

Bundle = dict[str, float]  # Ray resources by name


@dataclass(frozen=True, slots=True)
class Node:
    """A node as placing sees it: all that it has, whether it is free or not."""

    resources: Mapping[str, float]
    labels: Mapping[str, str]

    def suits(self, bundle: Bundle, labels: Mapping[str, str]) -> bool:
        return holds(self.resources, bundle) and all(matches(self.labels.get(k), v) for k, v in labels.items())


def misfit(placement: PlacementSettings, bundles: list[Bundle], nodes: Sequence[Node], copies: int = 1) -> str | None:
    """Why the nodes could not hold `copies` pipelines of these bundles even if they were empty; None where they could.

    One bundle for each of the placement's groups.
    """
    for group, bundle in zip(placement.groups, bundles, strict=True):
        if not any(node.suits(bundle, group.labels) for node in nodes):
            return f"no node has {shown(bundle, group.labels)} for {group.name}; {listed(nodes)}"
    if lays_out(placement, bundles * copies, nodes, [dict(node.resources) for node in nodes], []):
        return None
    pipelines = "a pipeline's processes" if copies == 1 else f"{copies} pipelines"
    each = "; ".join(f"{g.name}: {shown(b, g.labels)}" for g, b in zip(placement.groups, bundles, strict=True))
    return f"{placement.strategy} cannot lay out {pipelines} ({each}) over {listed(nodes)}"


def lays_out(
    placement: PlacementSettings, bundles: list[Bundle], nodes: Sequence[Node], free: list[Bundle], chosen: list[int]
) -> bool:
    """Whether the bundles after those for which a node is `chosen` (by index) find one, too, with what is `free`."""
    position, groups = len(chosen), placement.groups
    if position == len(bundles):
        return True
    bundle, labels = bundles[position], groups[position % len(groups)].labels
    mates = set(chosen[position - position % len(groups) :])  # nodes of the same pipeline
    for index, node in enumerate(nodes):
        alone = placement.strategy == "STRICT_SPREAD" and index in mates
        apart = placement.strategy == "STRICT_PACK" and mates - {index}
        if alone or apart or not (node.suits(bundle, labels) and holds(free[index], bundle)):
            continue
        left = [*free]
        left[index] = {name: amount - bundle.get(name, 0.0) for name, amount in free[index].items()}
        if lays_out(placement, bundles, nodes, left, [*chosen, index]):
            return True
    return False


def holds(resources: Mapping[str, float], bundle: Bundle) -> bool:
    return all(resources.get(name, 0.0) >= amount - 1e-6 for name, amount in bundle.items())


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
