"""Ray for the tests of a module, and three placed tiers in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import psutil
import pytest

from actors.pipeline import Pipeline
from deploy.app import prepare_environment
from triforce_core.config import Settings

Running = tuple[asyncio.Runner, Pipeline]
StartPipeline = Callable[[Settings], AbstractContextManager[Running]]


@contextmanager
def running(settings: Settings) -> Iterator[Running]:
    """The tiers of these settings in the Ray that we are connected to, and the loop that they are driven from."""
    from ray.util import remove_placement_group

    from actors.placement import reserve

    group = reserve(settings)
    try:
        with asyncio.Runner() as runner:
            pipeline = runner.run(Pipeline.start(settings, group))
            yield runner, pipeline
            runner.run(pipeline.stop())
    finally:
        remove_placement_group(group)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Whatever is started within ends within."""
    before = children()
    yield
    _, alive = psutil.wait_procs(children() - before, timeout=10)
    assert not alive, alive


@pytest.fixture(scope="module")
def start_pipeline() -> Iterator[StartPipeline]:
    """Places the tiers of given settings in a Ray of the module's own; ends them on leaving."""
    prepare_environment()
    import ray

    with nothing_left():
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            yield running
        finally:
            ray.shutdown()


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))
