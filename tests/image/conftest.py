"""The CPU image, built once. `make test-image` runs these tests; they are skipped where there is no engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image.engine import Engine, found

REPOSITORY = Path(__file__).resolve().parents[2]
TAG = "triforce-serve:test-cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(3600))  # the first waits for the build


@pytest.fixture(scope="session")
def engine() -> Engine:
    name = found()
    if name is None:
        pytest.skip("neither docker nor podman with buildah works here")
    return Engine(name)


@pytest.fixture(scope="session")
def image(engine: Engine) -> str:
    seconds = engine.build(TAG, REPOSITORY, "--build-arg", "VARIANT=cpu")
    layers = [round(size / 1e6, 1) for size in engine.layers(TAG).values()]
    print(f"\nbuilt by {engine.name} in {seconds:.0f} s, layers in MB: {layers}")
    return TAG


@pytest.fixture(scope="module")
def network(engine: Engine) -> Iterator[str]:
    name = "triforce-test"
    engine("network", "create", name)
    yield name
    engine("network", "rm", name)
