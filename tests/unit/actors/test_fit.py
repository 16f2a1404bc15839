"""Which clusters could hold a pipeline, and what is said of the others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import actors.placement
from actors.fit import Bundle, Node, can_lay_out, has_room, matches, misfit
from actors.placement import alone, bundles
from triforce_core.config import PlacementSettings, Settings, load_settings

TYPE = "ray.io/accelerator-type"
TIERS = ["target", "retrieval", "draft"]


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


def tried(wanted: PlacementSettings, each: list[Bundle], nodes: Sequence[Node], chosen: tuple[int, ...] = ()) -> bool:
    """Whether the other bundles find nodes, if these nodes are `chosen` for the first bundles. It tries every node for
    every bundle.
    """
    if len(chosen) == len(each):
        return True
    groups = len(wanted.groups)
    bundle, labels = each[len(chosen)], wanted.groups[len(chosen) % groups].labels
    mates = set(chosen[len(chosen) - len(chosen) % groups :])  # nodes of the same pipeline
    for index, candidate in enumerate(nodes):
        there = [bundle, *(other for other, at in zip(each, chosen, strict=False) if at == index)]
        together = {name: sum(one.get(name, 0.0) for one in there) for one in there for name in one}
        alone = wanted.strategy == "STRICT_SPREAD" and index in mates
        apart = wanted.strategy == "STRICT_PACK" and mates - {index}
        fits = candidate.suits(bundle, labels) and has_room(candidate.resources, together)
        if fits and not alone and not apart and tried(wanted, each, nodes, (*chosen, index)):
            return True
    return False


@given(
    strategy=st.sampled_from(["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]),
    colocate=st.sampled_from(["none", "none", "draft_with_retrieval"]),
    each=st.lists(st.tuples(st.sampled_from([0.1, 0.5, 1]), st.sampled_from([0.0, 0.3, 0.5, 1.0, 2.0])), min_size=3),
    labels=st.lists(st.sampled_from(["", "", "H100", "!H100"]), min_size=3, max_size=3),
    nodes=st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(0, 4), st.sampled_from([None, "H100"])), max_size=4),
    copies=st.integers(1, 3),
)
def test_what_is_laid_out_fits_and_one_node_is_filled(
    strategy: str,
    colocate: str,
    each: list[tuple[float, float]],
    labels: list[str],
    nodes: list[tuple[int, int, str | None]],
    copies: int,
) -> None:
    tiers = ("draft", "retrieval", "target")
    of = {t: {"labels": {TYPE: label} if label else {}} for t, label in zip(tiers, labels, strict=True)}
    of["draft"] = {} if colocate != "none" else of["draft"]  # which shares the retrieval tier's node
    wanted = load_settings(placement={"strategy": strategy, "colocate": colocate, **of}).placement
    one: list[Bundle] = [{"CPU": cpu, "GPU": gpu} if gpu else {"CPU": cpu} for cpu, gpu in each[: len(wanted.groups)]]
    there = [node(cpus, gpus, kind) for cpus, gpus, kind in nodes]
    found, fits = can_lay_out(wanted, one, there, copies), tried(wanted, one * copies, there)
    assert found == fits if len(there) < 2 else found <= fits


@pytest.mark.timeout(30)
@pytest.mark.parametrize("strategy", ["PACK", "STRICT_SPREAD", "STRICT_PACK"])
def test_hundreds_of_pipelines_on_a_hundred_nodes_are_laid_out_in_moments(strategy: str) -> None:
    """They fit to the last GPU, and not one more fits. There are three kinds of bundles."""
    tiers = {"target": {"gpus": 1}, "retrieval": {"gpus": 0.75}, "draft": {"gpus": 0.25}}
    settings = load_settings(placement={"strategy": strategy, **tiers})
    nodes = [node(cpus=64, gpus=8)] * 100
    each = bundles(settings, beside_target=0.5)
    assert len(set(map(str, each))) == 3
    assert misfit(settings.placement, each, nodes, 400) is None
    assert "401 pipelines" in str(misfit(settings.placement, each, nodes, 401))


def test_the_replicas_own_process_shares_the_targets_bundle() -> None:
    settings = Settings(placement=placement())
    alone, shared = bundles(settings), bundles(settings, beside_target=0.5)
    assert shared == [{"CPU": 0.6, "GPU": 1.0}, *alone[1:]]
    nothing = load_settings(placement={"cpus": 0})
    assert bundles(nothing) == [{"CPU": 0.001}] * 3


def test_the_ranks_of_a_tier_are_on_one_node() -> None:
    each = {t: {"gpus": 1} for t in ("draft", "retrieval", "target")}
    settings = load_settings(target={"tensor_parallel": 2}, placement={"cpus": 0.5, **each})
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


@pytest.mark.parametrize(
    ("settings", "cores", "one"),
    [
        ({}, 8, False),
        ({"placement": {"colocate": "draft_with_retrieval"}}, 8, False),
        ({"placement": {"colocate": "all"}}, 8, True),
        ({"placement": {"colocate": "all"}}, 2, False),  # of a container whose limit is two of eight
        ({"placement": {"colocate": "all"}, "device": "cuda"}, 8, False),
        ({"placement": {"colocate": "all"}, "server": {"replicas": {"min": 1, "max": 2}}}, 8, False),
        ({"placement": {"colocate": "all"} | {tier: {"cores": [0]} for tier in TIERS}}, 8, False),
        ({"placement": {"colocate": "all"}} | {tier: {"tensor_parallel": 2} for tier in TIERS[:2]}, 8, False),
    ],
    ids=str,
)
def test_threads_spin_where_one_process_has_all_cores(
    settings: dict[str, object], cores: int, one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.placement, "allowed_cores", lambda: 8)
    monkeypatch.setattr(actors.placement, "usable_cores", lambda: cores)
    assert alone(load_settings(**settings)) is one
