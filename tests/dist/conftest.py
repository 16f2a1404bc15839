"""Ray for the tests of a module, and three placed tiers in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import psutil
import pytest

from actors.pipeline import Pipeline
from actors.placement import tier_bundle
from deploy.app import prepare_environment
from triforce_core.config import Settings

Running = tuple[asyncio.Runner, Pipeline]
StartPipeline = Callable[[Settings], AbstractContextManager[Running]]


@pytest.fixture(scope="module")
def start_pipeline() -> Iterator[StartPipeline]:
    """Places the tiers of given settings, with the loop that they are driven from; ends them on leaving."""
    prepare_environment()
    import ray
    from ray.util import placement_group, remove_placement_group

    @contextmanager
    def start(settings: Settings) -> Iterator[Running]:
        group = placement_group([tier_bundle(settings.server)] * 3)
        try:
            ray.get(group.ready(), timeout=60)
            with asyncio.Runner() as runner:
                pipeline = runner.run(Pipeline.start(settings, group))
                yield runner, pipeline
                runner.run(pipeline.stop())
        finally:
            remove_placement_group(group)

    before = children()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield start
    finally:
        ray.shutdown()
    _, alive = psutil.wait_procs(children() - before, timeout=10)
    assert not alive, alive


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))
