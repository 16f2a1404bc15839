"""Checks whether a cluster could hold a pipeline and, if not, gives the reason, so that users do not wait in vain."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triforce_core.config import PlacementSettings

Bundle = dict[str, float]  # Ray resources by name
SLACK = 1e-6  # tolerance for comparing amounts: sums of decimal fractions are inexact


@dataclass(frozen=True, slots=True)
class Node:
    """A node's labels, and its total resources, whether free or taken."""

    resources: Mapping[str, float]
    labels: Mapping[str, str]

    def suits(self, bundle: Bundle, labels: Mapping[str, str]) -> bool:
        return has_room(self.resources, bundle) and all(matches(self.labels.get(k), v) for k, v in labels.items())


def misfit(placement: PlacementSettings, bundles: list[Bundle], nodes: Sequence[Node], copies: int = 1) -> str | None:
    """Why the nodes, even if empty, seem not to hold `copies` pipelines of these bundles; None if they do."""
    for group, bundle in zip(placement.groups, bundles, strict=True):
        if not any(node.suits(bundle, group.labels) for node in nodes):
            return f"no node has {shown(bundle, group.labels)} for {group.name}; {listed(nodes)}"
    if can_lay_out(placement, bundles, nodes, copies):
        return None
    pipelines = "a pipeline's processes" if copies == 1 else f"{copies} pipelines"
    each = "; ".join(f"{g.name}: {shown(b, g.labels)}" for g, b in zip(placement.groups, bundles, strict=True))
    return f"{placement.strategy} cannot lay out {pipelines} ({each}) over {listed(nodes)}"


def can_lay_out(placement: PlacementSettings, bundles: list[Bundle], nodes: Sequence[Node], copies: int) -> bool:
    """Whether each bundle of `copies` pipelines finds a node: the first with room, the bundles with the fewest nodes
    first, and large ones before small. With several nodes and scarce room, another order may succeed where this fails.
    """
    groups = [(bundle, [group.labels]) for bundle, group in zip(bundles, placement.groups, strict=True)]
    if placement.strategy == "STRICT_PACK":  # all bundles of a pipeline are one
        together = {name: sum(bundle.get(name, 0.0) for bundle in bundles) for bundle in bundles for name in bundle}
        groups = [(together, [group.labels for group in placement.groups])]
    suiting = [
        [i for i, node in enumerate(nodes) if all(node.suits(b, each) for each in labels)] for b, labels in groups
    ]
    left, used = [dict(node.resources) for node in nodes], [set[int]() for _ in range(copies)]
    for index in sorted(range(len(groups)), key=lambda i: (len(suiting[i]), -groups[i][0].get("GPU", 0.0))):
        bundle, _ = groups[index]
        for mates in used:  # nodes that hold bundles of the same pipeline
            taken = mates if placement.strategy == "STRICT_SPREAD" else ()
            found = next((i for i in suiting[index] if i not in taken and has_room(left[i], bundle)), None)
            if found is None:
                return False
            mates.add(found)
            left[found] = {name: amount - bundle.get(name, 0.0) for name, amount in left[found].items()}
    return True


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
