"""Starting what takes seconds and many processes, so that tests may share it and a busy machine does not fail them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any, TypeVar

import psutil

Started = TypeVar("Started")
ENDS_WITHIN_S = 15.0


def children() -> set[psutil.Process]:
    """All processes below this one, except multiprocessing's resource tracker: Python starts it when it likes and ends
    it with us.
    """
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]  # has no public name
    return {child for child in psutil.Process().children(recursive=True) if child.pid != tracker}


def tried_twice(start: Callable[[], Started]) -> Started:
    """What `start` returns; if it raises, as Ray does when a busy disk keeps it waiting, it gets a second chance."""
    try:
        return or_nothing(start)
    except Exception as failed:
        warnings.warn(f"tried again, because the first start failed: {failed}", stacklevel=2)
        return or_nothing(start)


def or_nothing(start: Callable[[], Started]) -> Started:
    """What `start` returns; if it raises, the processes that it left are ended."""
    before = children()
    try:
        return start()
    except Exception:
        for each in children() - before:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        check_ended_since(before)
        raise


def check_ended_since(before: set[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(children() - before, timeout=ENDS_WITHIN_S)
    assert not alive, alive


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that every process that is started in the body has ended after it."""
    before = children()
    yield
    check_ended_since(before)


@contextmanager
def fake_nodes(nodes: list[dict[str, Any]]) -> Iterator[None]:
    """Connect to a cluster within this machine. It has a head without a GPU, and these nodes, each with one CPU."""
    from deploy.app import APPLICATION, prepare_environment

    prepare_environment()
    import ray
    from ray.cluster_utils import Cluster

    def start() -> Cluster:
        ray.shutdown()  # what an attempt that failed holds
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        for node in nodes:
            cluster.add_node(num_cpus=1, **node)
        ray.init(address=cluster.address, log_to_driver=False, namespace=APPLICATION)
        return cluster

    with nothing_left():
        cluster = tried_twice(start)
        try:
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()


class LocalRay:
    """One Ray for all modules that need no nodes of their own. A module that starts another Ray ends this one first."""

    def __init__(self) -> None:
        self.running = False
        self.before: set[psutil.Process] = set()

    def start(self) -> None:
        if self.running:
            return
        from deploy.app import prepare_environment

        prepare_environment()
        self.before = children()
        tried_twice(self.connect)
        self.running = True

    def connect(self) -> None:
        import ray

        ray.shutdown()  # what an attempt that failed holds
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

    def end(self) -> None:
        if not self.running:
            return
        import ray

        self.running = False
        ray.shutdown()
        check_ended_since(self.before)
