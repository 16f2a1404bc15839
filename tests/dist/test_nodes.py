"""Tiers on nodes with addresses of their own. They find one another, and an error tells of a tier that is not found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors import links, tiers
from actors.admission import Address
from actors.pipeline import Pipeline
from actors.placement import ACTORS, place_tiers, reserve
from actors.serving import LinkServer
from actors.tiers import DraftActor
from tests.charts import CHART, rendered, serve_config
from tests.conftest import HeldOut
from tests.dist.conftest import running
from tests.dist.decoding import Tiers
from tests.dist.test_pipeline import SETTINGS, in_one_process, request
from tests.starting import LocalRay, fake_nodes
from triforce_core.building.loading import load_local_engine
from triforce_core.config import Settings, load_settings
from triforce_core.messages import Tier

TIER_ADDRESSES = {"target": "127.0.0.2", "retrieval": "127.0.0.3", "draft": "127.0.0.4"}
ADDRESSES = {*TIER_ADDRESSES.values()}
NOWHERE = "127.0.0.9:1"

pytestmark = pytest.mark.slow  # a cluster of four nodes


@pytest.fixture(scope="module", autouse=True)
def cluster(local_ray: LocalRay) -> Iterator[None]:
    local_ray.end()
    nodes = [
        {"node_ip_address": address, "num_gpus": 1, "labels": {"zone": "tiers", "triforce/tier": tier}}
        for tier, address in TIER_ADDRESSES.items()
    ]
    with fake_nodes(nodes):
        yield


def arranged(strategy: str, colocate: str = "none") -> Settings:
    in_zone = {tier.name.lower(): {"labels": {"zone": "tiers"}} for tier in Tier}
    placement = load_settings(placement={"strategy": strategy, "colocate": colocate, **in_zone}).placement
    return SETTINGS.model_copy(update={"placement": placement})


@pytest.fixture(scope="module")
def rendered_settings() -> Settings:
    """The demo pair, placed as in the chart's example with a GPU for each tier. The nodes' GPUs are not real."""
    [application] = serve_config(rendered(CHART / "examples" / "three-gpus.yaml"))["applications"]
    return SETTINGS.model_copy(update={"placement": load_settings(None, **application["args"]).placement})


def test_the_charts_three_gpus_speculate_across_nodes(held_out: HeldOut, rendered_settings: Settings) -> None:
    placement = rendered_settings.placement
    assert [(group.gpus, group.labels["triforce/tier"]) for group in placement.groups] == [
        (1, "target"),
        (1, "retrieval"),
        (1, "draft"),
    ]
    asked = request(held_out("inspect.py", 600), max_tokens=40)
    with running(rendered_settings) as (runner, pipeline):
        found = Tiers(pipeline, runner.run)
        status = found.status()
        assert {name: host_of(each.address) for name, each in status.items()} == TIER_ADDRESSES
        [decoded] = found.decode(asked)
        assert decoded.tokens == in_one_process(load_local_engine(SETTINGS), asked)
        assert set(decoded.origins) == {0, 1, 2}
        for link in ("target>retrieval", "retrieval>draft"):
            carried = found.links()[link]
            assert carried.proposed_tokens > 0
            assert carried.bytes_in > 0
        found.wait_idle()


def host_of(address: str) -> str:
    return address.rpartition(":")[0]


def test_three_tiers_on_three_nodes_speculate(held_out: HeldOut) -> None:
    engine = load_local_engine(SETTINGS)
    asked = [request(held_out("inspect.py", 600), max_tokens=40, seed=seed) for seed in range(3)]
    with running(arranged("STRICT_SPREAD")) as (runner, pipeline):
        found = Tiers(pipeline, runner.run)
        assert {host_of(status.address) for status in found.status().values()} == ADDRESSES
        decoded = found.decode(*asked)
        assert [d.tokens for d in decoded] == [in_one_process(engine, each) for each in asked]
        assert {origin for d in decoded for origin in d.origins} == {0, 1, 2}
        assert sum(d.stats[-1].tallies[0].accepted for d in decoded) > 0
        assert sum(d.stats[-1].tallies[1].accepted for d in decoded) > 0
        assert not any(status.HasField("silent") for status in found.status().values())
        found.wait_idle()


@pytest.mark.parametrize(("strategy", "colocate"), [("STRICT_PACK", "none"), ("STRICT_SPREAD", "all")])
def test_tiers_on_one_node_are_reached_from_there_alone(strategy: str, colocate: str) -> None:
    with running(arranged(strategy, colocate)) as (runner, pipeline):
        statuses = Tiers(pipeline, runner.run).status().values()
        assert {host_of(status.address) for status in statuses} == {"127.0.0.1"}


class LostDraftActor(DraftActor):
    """This actor tells an address at which nobody is."""

    def serve(self, host: str) -> LinkServer:
        server = super().serve(host)
        server.address = Address(NOWHERE, "")
        return server


def impatient(_: Any) -> None:
    links.SILENT_S, tiers.CONNECT_TIMEOUT_S = 1.0, 0.1


def logged(words: str) -> int:
    import ray

    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    return sum(log.read_text(errors="replace").count(words) for log in logs.glob("worker-*.err"))


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)


def test_a_tier_that_is_not_found_is_named_in_log_and_status(held_out: HeldOut) -> None:
    import ray
    from ray.util import remove_placement_group

    engine = load_local_engine(SETTINGS)
    asked = request(held_out("inspect.py", 600), max_tokens=40)
    settings = arranged("STRICT_SPREAD")
    group = reserve(settings)
    try:
        with asyncio.Runner() as runner:
            pipeline = Pipeline(place_tiers(settings, group, {**ACTORS, "draft": LostDraftActor}))
            ray.get([actor.__ray_call__.remote(impatient) for actor in pipeline.actors.each()])
            runner.run(pipeline.connect())
            found = Tiers(pipeline, runner.run)
            wait_until(lambda: found.status()["retrieval"].HasField("silent"))
            status = found.status()
            assert (status["retrieval"].silent.tier, status["retrieval"].silent.address) == ("draft", NOWHERE)
            assert status["retrieval"].silent.silent_s >= 1
            assert not any(status[other].HasField("silent") for other in ("draft", "target"))
            wait_until(lambda: logged("the draft tier has not answered for") >= 2)
            assert logged(f"s, at {NOWHERE}") >= 2
            [decoded] = found.decode(asked)
            assert decoded.tokens == in_one_process(engine, asked)
            assert set(decoded.origins) == {1, 2}
            runner.run(pipeline.stop())
    finally:
        remove_placement_group(group)
