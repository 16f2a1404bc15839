"""Three placed tiers, in a Ray that modules share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from actors.pipeline import Pipeline
from tests.starting import LocalRay
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


@pytest.fixture(scope="module")
def start_pipeline(local_ray: LocalRay) -> StartPipeline:
    """Places the tiers of given settings in the Ray that these modules share; ends them on leaving."""
    local_ray.start()
    return running
