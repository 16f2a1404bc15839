"""How a server ends: what is in flight has the same time for it everywhere, and a second signal ends it at once."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from deploy.app import APPLICATION, ENVIRONMENT, application_of, drain, local_ray, prepare_environment
from tests.serve.conftest import Server, free_ports, start
from tests.starting import tried_twice
from triforce_core.client.request import MAX_MESSAGE_BYTES
from triforce_core.config import load_settings
from triforce_core.errors import UnavailableError


@pytest.mark.parametrize(
    ("given", "drain_s"), [({}, 600), ({"request_timeout_s": 50}, 50), ({"drain_timeout_s": 7}, 7)]
)
def test_one_setting_for_all_that_drains(given: dict[str, Any], drain_s: float) -> None:
    prepare_environment()  # before Ray is imported
    settings = load_settings(dtype="float32", server=given)
    gateway = application_of(settings)._bound_deployment
    [pipeline] = [each._bound_deployment for each in gateway.init_args if hasattr(each, "_bound_deployment")]
    assert (gateway.name, pipeline.name) == ("gateway", "pipeline")
    for deployment in (gateway, pipeline):
        assert deployment._deployment_config.graceful_shutdown_timeout_s == drain_s
    assert settings.server.drain_s == drain_s


def test_the_port_and_replicas_take_what_clients_send() -> None:
    for name in ("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"):
        assert ENVIRONMENT[name] == str(MAX_MESSAGE_BYTES)


@pytest.mark.parametrize(("answer", "deleted"), [(True, [APPLICATION]), (False, []), (TimeoutError(), [])])
def test_only_a_drain_that_says_so_is_done(
    monkeypatch: pytest.MonkeyPatch, answer: bool | Exception, deleted: list[str]
) -> None:
    """To delete the application, Serve waits for its requests as long again."""
    drained, seen = Mock(side_effect=[answer]), list[str]()
    monkeypatch.setattr("ray.serve.delete", seen.append)
    drain(Mock(**{"drain.remote.return_value.result": drained}), 3.0)
    assert drained.called
    assert seen == deleted


def test_a_ray_that_does_not_start_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", Mock(side_effect=Exception("the node timed out")))
    with pytest.raises(UnavailableError, match=r"^Ray did not start: the node timed out$"), local_ray(load_settings()):
        pass


def said(log: Path, words: str, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while words not in log.read_text():
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("second", [signal.SIGINT, None])
def test_a_server_that_drains(tmp_path: Path, second: signal.Signals | None) -> None:
    """A stream in flight goes on until a second signal, or until its time is over; then all ends within seconds."""
    config, log = tmp_path / "config.yaml", tmp_path / "log.txt"
    port, grpc_port = free_ports(2)
    drain_s = 300 if second else 5
    config.write_text(f"dtype: float32\nserver: {{port: {port}, grpc_port: {grpc_port}, drain_timeout_s: {drain_s}}}\n")
    process = tried_twice(lambda: start(config, log))
    started = psutil.Process(process.pid).children(recursive=True)
    try:
        lines = Server(port, grpc_port, process).stream(max_tokens=16_000, temperature=0).iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        said(log, f"requests in flight have {drain_s} s to end; Ctrl-C again stops at once", 10)
        for _ in range(20):
            next(lines)
        assert process.poll() is None
        if second:
            process.send_signal(second)
        assert process.wait(30) == 0
    finally:
        process.kill()
        _, left = psutil.wait_procs(started, timeout=10)
        for each in left:
            each.kill()
    assert ("stopping at once" in log.read_text()) == (second is not None)
    assert "Traceback" not in log.read_text(), log.read_text()
    assert not left, f"left behind: {left}"
