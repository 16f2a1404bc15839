"""Which clusters could hold a pipeline, and what is said of the others."""

from __future__ import annotations

import pytest

from actors.fit import Node, matches, misfit
from actors.placement import bundles
from triforce_core.config import PlacementSettings, Settings, load_settings

TYPE = "ray.io/accelerator-type"


def node(cpus: float = 8, gpus: float = 0, kind: str | None = None) -> Node:
    resources = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    return Node(resources, {"ray.io/node-id": "1f", **({TYPE: kind} if kind else {})})


def placement(strategy: str = "PACK", colocate: str = "none", gpus: float = 1.0, **labels: str) -> PlacementSettings:
    tiers = {
        t: {"gpus": gpus, "labels": {TYPE: labels[t]} if t in labels else {}} for t in ("draft", "retrieval", "target")
    }
    return load_settings(placement={"strategy": strategy, "colocate": colocate, **tiers}).placement


ONE, FOUR, SPREAD = [node(gpus=1)], [node(gpus=4)], [node(gpus=1)] * 3
MIXED = [node(gpus=1, kind="H100"), node(gpus=1, kind="L4"), node(gpus=1, kind="L4"), node()]


@pytest.mark.parametrize(
    ("wanted", "nodes", "reason"),
    [
        (placement(), FOUR, None),
        (placement(), SPREAD, None),
        (placement(), ONE, "PACK cannot lay out a pipeline's processes (target: 0.1 CPU, 1 GPU; retrieval: "),
        (placement(), ONE, "over 1 node (8 CPU, 1 GPU)"),
        (placement("SPREAD"), FOUR, None),
        (placement("STRICT_PACK"), FOUR, None),
        (placement("STRICT_PACK"), SPREAD, "STRICT_PACK cannot lay out"),
        (placement("STRICT_SPREAD"), SPREAD, None),
        (placement("STRICT_SPREAD"), FOUR, "STRICT_SPREAD cannot lay out"),
        (placement("STRICT_SPREAD", "all", gpus=0.25), FOUR, None),
        (placement("STRICT_SPREAD", "draft_with_retrieval", gpus=0.5), SPREAD[:2], None),
        (placement("STRICT_SPREAD", "draft_with_retrieval", gpus=0.5), ONE, "STRICT_SPREAD cannot lay out"),
        (placement(gpus=0.3), ONE, None),
        (placement(gpus=0.4), ONE, "PACK cannot lay out"),
        (placement(gpus=0), [node(cpus=0.3)], None),
        (placement(gpus=0), [node(cpus=0.25)], "PACK cannot lay out"),
        (placement(gpus=2), SPREAD, "no node has 0.1 CPU, 2 GPU for target; 3 nodes (8 CPU, 1 GPU; "),
        (placement(target="H100"), MIXED, None),
        (placement(target="L4", draft="H100"), MIXED, None),  # the retrieval tier must leave them theirs
        (placement(target="H100", draft="H100"), MIXED, "PACK cannot lay out"),
        (placement(draft="B200"), MIXED, f"no node has 0.1 CPU, 1 GPU, {TYPE}=B200 for draft; 4 nodes"),
        (placement(), [], "no node has 0.1 CPU, 1 GPU for target; 0 nodes"),
    ],
)
def test_what_does_not_fit_is_said(wanted: PlacementSettings, nodes: list[Node], reason: str | None) -> None:
    said = misfit(wanted, bundles(Settings(placement=wanted)), nodes)
    assert said is None if reason is None else (said is not None and reason in said), said


@pytest.mark.parametrize(("copies", "fits"), [(1, True), (3, True), (4, False)])
def test_every_pipeline_needs_its_own(copies: int, fits: bool) -> None:
    wanted = placement("STRICT_SPREAD", "draft_with_retrieval", gpus=0.5)
    nodes = [node(gpus=1), node(gpus=1), node(gpus=1), node(gpus=2, kind="H100")]
    said = misfit(wanted, bundles(Settings(placement=wanted)), nodes, copies)
    assert (said is None) == fits, said
    assert fits or f"{copies} pipelines" in str(said)


def test_the_replicas_own_process_shares_the_targets_bundle() -> None:
    settings = Settings(placement=placement())
    alone, shared = bundles(settings), bundles(settings, beside_target=0.5)
    assert shared == [{"CPU": 0.6, "GPU": 1.0}, *alone[1:]]
    nothing = load_settings(placement={t: {"cpus": 0} for t in ("draft", "retrieval", "target")})
    assert bundles(nothing) == [{"CPU": 0.001}] * 3


def test_the_ranks_of_a_tier_are_on_one_node() -> None:
    each = {t: {"gpus": 1, "cpus": 0.5} for t in ("draft", "retrieval", "target")}
    settings = load_settings(target={"tensor_parallel": 2}, placement=each)
    found = bundles(settings)
    assert found == [{"CPU": 1.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 2.0}, {"CPU": 0.5, "GPU": 1.0}]
    assert misfit(settings.placement, found, [node(gpus=2), node(gpus=3)]) is None
    said = misfit(settings.placement, found, [node(gpus=1)] * 8)
    assert said is not None
    assert "no node has 1 CPU, 2 GPU for target" in said


@pytest.mark.parametrize(
    ("selector", "H100", "L4", "none"),
    [
        ("H100", True, False, False),
        ("!H100", False, True, True),
        ("in(H100, A100)", True, False, False),
        ("!in(H100,A100)", False, True, True),
    ],
)
def test_label_selectors_are_rays(selector: str, H100: bool, L4: bool, none: bool) -> None:
    assert [matches("H100", selector), matches("L4", selector), matches(None, selector)] == [H100, L4, none]
