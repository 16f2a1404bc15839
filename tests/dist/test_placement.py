"""Every arrangement lands where the settings say, in a cluster of fake nodes with fake GPUs, and changes no token."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.conftest import HeldOut
from tests.dist.conftest import running
from tests.dist.decoding import Tiers
from tests.dist.test_pipeline import SETTINGS, in_one_process, request
from tests.starting import LocalRay, fake_nodes
from triforce_core.building.loading import load_local_engine
from triforce_core.config import Settings, load_settings
from triforce_core.errors import InvalidValueError, UnavailableError
from triforce_core.machine.cores import CPU_LATENCY
from triforce_core.messages import Tier

TYPE = "ray.io/accelerator-type"
SHARES = {"draft": 0.25, "retrieval": 0.25, "target": 0.5}  # of a GPU
PROCESSES = {"none": 3, "draft_with_retrieval": 2, "all": 1}
STRATEGIES = (
    "PACK",
    "SPREAD",
    "STRICT_PACK",
    "STRICT_SPREAD",
)


pytestmark = pytest.mark.slow  # each test starts actors on nodes of its own


@pytest.fixture(scope="module", autouse=True)
def cluster(local_ray: LocalRay) -> Iterator[None]:
    """A head without a GPU, a node with two H100, two with an L4."""
    local_ray.end()
    nodes = [{"num_gpus": gpus, "labels": {TYPE: kind}} for kind, gpus in (("H100", 2), ("L4", 1), ("L4", 1))]
    with fake_nodes(nodes):
        yield


@pytest.fixture(autouse=True)
def all_is_free(cluster: None) -> None:
    """Wait until everything is free. A group that was removed gives back what it held a little later, and Ray places
    actors on what is free.
    """
    import ray

    def free() -> bool:
        available = ray.available_resources()
        return all(available.get(kind) == ray.cluster_resources()[kind] for kind in ("CPU", "GPU"))

    until = time.monotonic() + 30
    while not free():
        assert time.monotonic() < until, ray.available_resources()
        time.sleep(0.1)


@dataclass(frozen=True)
class Landed:
    """Where an actor found itself."""

    pid: int
    node: str
    labels: dict[str, str]
    gpus: list[str]  # ids
    visible: str | None  # what CUDA is told
    resources: dict[str, float] = field(hash=False)
    waiting: str | None  # how OpenMP's threads wait


def where(_: Any) -> Landed:
    """Where this actor is; runs in an actor."""
    import ray

    context = ray.get_runtime_context()
    resources = {k: v for k, v in context.get_assigned_resources().items() if k in ("CPU", "GPU")}
    gpus = context.get_accelerator_ids()["GPU"]
    labels = dict(context.get_node_labels())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    waiting = context.runtime_env["env_vars"].get("OMP_WAIT_POLICY")
    return Landed(os.getpid(), context.get_node_id(), labels, gpus, visible, resources, waiting)


@contextmanager
def placed(settings: Settings) -> Iterator[dict[Tier, Landed]]:
    """The actors of a pipeline, without their models, and where they are."""
    import ray
    from ray.util import remove_placement_group

    from actors.placement import place_tiers, reserve

    group = reserve(settings, timeout_s=30)
    actors = place_tiers(settings, group)
    try:
        yield {tier: ray.get(actor.__ray_call__.remote(where), timeout=60) for tier, actor in actors.all().items()}
    finally:
        for actor in actors.each():
            ray.kill(actor)
        remove_placement_group(group)


def arranged(colocate: str, strategy: str = "PACK", **tiers: dict[str, Any]) -> Settings:
    """Settings with these placements; every tier has its share of a GPU."""
    each = {tier: {"gpus": share, **tiers.get(tier, {})} for tier, share in SHARES.items()}
    return SETTINGS.model_copy(
        update={"placement": load_settings(placement={"colocate": colocate, "strategy": strategy, **each}).placement}
    )


@pytest.mark.parametrize("colocate", PROCESSES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_arrangement_lands_as_configured(strategy: str, colocate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.placement import alone

    monkeypatch.delenv("OMP_THREAD_LIMIT")  # the only process may take all cores
    settings = arranged(colocate, strategy)
    with placed(settings) as tiers:
        processes = {landed.pid: landed for landed in tiers.values()}
        nodes = {landed.node for landed in tiers.values()}
        assert len(processes) == PROCESSES[colocate]
        assert {landed.waiting for landed in processes.values()} == {None if alone(settings) else "PASSIVE"}
        assert len(nodes) == (1 if strategy in ("PACK", "STRICT_PACK") else len(processes))
        assert (tiers[Tier.DRAFT] == tiers[Tier.RETRIEVAL]) == (colocate != "none")
        assert (tiers[Tier.RETRIEVAL] == tiers[Tier.TARGET]) == (colocate == "all")
        for landed in processes.values():
            share = sum(SHARES[t.name.lower()] for t, other in tiers.items() if other == landed)
            assert landed.resources["GPU"] == pytest.approx(share)
            assert len(landed.gpus) == 1
            assert landed.visible == landed.gpus[0]


@pytest.mark.parametrize(
    ("colocate", "labels", "expected"),
    [
        ("none", {"target": "H100", "retrieval": "L4", "draft": "!H100"}, ("L4", "L4", "H100")),
        ("draft_with_retrieval", {"target": "L4", "draft": "in(A100,H100)"}, ("H100", "H100", "L4")),
        ("all", {"draft": "H100"}, ("H100", "H100", "H100")),
    ],
)
def test_labels_choose_the_nodes(colocate: str, labels: dict[str, str], expected: tuple[str, ...]) -> None:
    settings = arranged(colocate, **{tier: {"labels": {TYPE: label}} for tier, label in labels.items()})
    with placed(settings) as tiers:
        assert tuple(landed.labels[TYPE] for landed in tiers.values()) == expected


def test_whole_gpus_are_nobody_elses() -> None:
    whole = {"target": {"gpus": 2}, "retrieval": {"gpus": 1}, "draft": {"gpus": 1}}
    with placed(arranged("none", **whole)) as tiers:
        assert sorted(tiers[Tier.TARGET].gpus) == ["0", "1"]
        assert len({(landed.node, gpu) for landed in tiers.values() for gpu in landed.gpus}) == 4


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (arranged("none", target={"labels": {TYPE: "B200"}}), "no node has .* 0.5 GPU, .*=B200 for target; 4 nodes"),
        (arranged("none", retrieval={"gpus": 3}), "no node has .* 3 GPU for retrieval; 4 nodes .*2 GPU.*=H100"),
        (
            arranged("none", "STRICT_SPREAD", **{tier: {"labels": {TYPE: "L4"}} for tier in SHARES}),
            "STRICT_SPREAD cannot lay out a pipeline's processes",
        ),
        (arranged("none", "STRICT_PACK", **{t: {"gpus": 1.0} for t in SHARES}), "STRICT_PACK cannot lay out"),
        (arranged("none", **{t: {"gpus": 1.0, "labels": {TYPE: "L4"}} for t in SHARES}), "PACK cannot lay out"),
    ],
    ids=["label", "gpus", "strict spread", "strict pack", "too many"],
)
def test_what_cannot_be_placed_is_said(settings: Settings, reason: str) -> None:
    from actors.placement import reserve

    began = time.monotonic()
    with pytest.raises(UnavailableError, match=f"no place for the pipeline within 2 s: {reason}"):
        reserve(settings, timeout_s=2)
    assert time.monotonic() - began < 20


def test_what_is_taken_is_said() -> None:
    from ray.util import remove_placement_group

    from actors.placement import reserve

    both = arranged("none", target={"gpus": 2})
    for _ in range(2):
        group = reserve(both)
        with pytest.raises(UnavailableError, match="what it needs is there, and taken"):
            reserve(both, timeout_s=2)
        remove_placement_group(group)


def in_each_thread() -> list[set[int]]:
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]


def test_a_tier_keeps_to_its_cores() -> None:
    import ray

    cores = sorted(os.sched_getaffinity(0))
    first, last = cores[0], cores[-1]
    settings = arranged("draft_with_retrieval", draft={"cores": [first]}, target={"cores": [last]})
    with running(settings) as (runner, pipeline):
        tiers = Tiers(pipeline, runner.run)
        tiers.decode(request((1, 2, 3), max_tokens=8))
        for actor, core in ((pipeline.actors.draft, first), (pipeline.actors.target, last)):
            affinities = ray.get(actor.__ray_call__.remote(lambda _: in_each_thread()), timeout=30)
            assert len(affinities) > 5, "gRPC's, Ray's and torch's threads are among them"
            assert all(affinity == {core} for affinity in affinities)


def test_cores_that_are_not_there_are_refused() -> None:
    with (
        pytest.raises(InvalidValueError, match=re.escape("placement.target.cores: [4096] must be among the cores of")),
        running(arranged("all", target={"cores": [4096]})),
    ):
        pass


@pytest.mark.skipif(not os.access(CPU_LATENCY, os.R_OK | os.W_OK), reason="only root may ask, on Linux")
def test_cores_are_kept_awake_while_tiers_live() -> None:
    import ray

    def longest() -> int:
        return int.from_bytes(CPU_LATENCY.read_bytes(), sys.byteorder, signed=True)

    before = longest()
    settings = arranged("none")
    placement = settings.placement.model_copy(update={"cpu_latency_us": 7})
    with running(settings.model_copy(update={"placement": placement})) as (_, pipeline):
        for actor in pipeline.actors.each():
            assert ray.get(actor.__ray_call__.remote(lambda tier: tier.awake is not None), timeout=30)
        assert longest() == min(7, before)
    until = time.monotonic() + 30
    while longest() != before and time.monotonic() < until:
        time.sleep(0.1)
    assert longest() == before


LINKS = {"none": {"target>retrieval", "retrieval>draft"}, "draft_with_retrieval": {"target>retrieval"}, "all": set()}


@pytest.mark.parametrize("colocate", PROCESSES)
def test_every_arrangement_gives_the_tokens_of_one_process(colocate: str, held_out: HeldOut) -> None:
    import ray

    engine = load_local_engine(SETTINGS)
    asked = [request(held_out("inspect.py", 600), max_tokens=20, seed=seed) for seed in range(4)]
    with running(arranged(colocate)) as (runner, pipeline):
        tiers = Tiers(pipeline, runner.run)
        decoded = tiers.decode(*asked)
        assert [d.tokens for d in decoded] == [in_one_process(engine, each) for each in asked]
        assert sum(d.stats[-1].tallies[0].accepted for d in decoded) > 0, "the retrieval tier took part"
        assert sum(d.stats[-1].tallies[1].proposed for d in decoded) > 0, "and the draft tier"
        assert [status.tier for status in runner.run(pipeline.status())] == ["draft", "retrieval", "target"]
        assert all(status.ready for status in tiers.status().values())
        assert tiers.links().keys() == LINKS[colocate]
        assert all(link.proposals > 0 for link in tiers.links().values())
        tiers.wait_idle()
        if colocate == "all":
            assert ray.get(pipeline.actors.target.__ray_call__.remote(shares_weights), timeout=30)


def shares_weights(actor: Any) -> bool:
    """Whether retrieval and target share one model; runs in an actor that holds all tiers."""
    target = actor.target_server.engine_thread.engine.decoder
    retrieval = target.proposer
    return retrieval.verifier.runner.model is target.verifier.runner.model


def test_a_drafting_process_that_is_killed_comes_back_with_both_tiers(held_out: HeldOut) -> None:
    import ray

    long = request(held_out("inspect.py", 600), max_tokens=120, seed=1)
    settings = arranged("draft_with_retrieval")
    with running(settings) as (runner, pipeline):
        tiers = Tiers(pipeline, runner.run)
        [expected] = tiers.decode(long)
        assert {0, 1, 2} == set(expected.origins)
        pid = ray.get(pipeline.actors.draft.__ray_call__.remote(lambda _: os.getpid()), timeout=30)

        async def with_fault() -> list[int]:
            tokens: list[int] = []
            async for event in pipeline.decode(long):
                tokens += event.token_ids
                if len(tokens) > 10 and runs(pid):
                    os.kill(pid, signal.SIGKILL)
            return tokens

        assert runner.run(with_fault()) == expected.tokens
        until = time.monotonic() + 60
        while 0 not in tiers.decode(long)[0].origins:
            assert time.monotonic() < until, "the drafting tiers do not come back"
        assert ray.get(pipeline.actors.draft.__ray_call__.remote(lambda _: os.getpid()), timeout=30) != pid


def runs(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")
