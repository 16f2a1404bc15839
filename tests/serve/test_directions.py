"""What a newcomer reads once the server is ready."""

from __future__ import annotations

import json
import re
import shlex
import socket
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import requests

from deploy.directions import directions, tiers_found
from tests.serve.conftest import Server
from triforce_core.config import load_settings

LOGS = Path("/tmp/ray/session/logs")


def tiers(**threads: int) -> list[dict[str, Any]]:
    """The tiers as /status reports them."""
    return [{"tier": tier, "threads": number} for tier, number in threads.items()]


def test_ten_lines_say_what_runs_where_and_how_to_call_it() -> None:
    settings = load_settings(dtype="bfloat16", server={"port": 8123})
    said = directions(settings, LOGS, tiers(target=2, retrieval=1, draft=1))
    assert len(said.splitlines()) <= 10
    assert "demo, bfloat16, on " in said
    assert "draft (1 thread); retrieval (1 thread); target (2 threads)" in said
    assert "http://127.0.0.1:8123/v1" in said
    assert str(LOGS) in said
    assert "127.0.0.1:9000 (triforce_core.client)" in said


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"placement": {"colocate": "all"}}, "target (4 threads) + retrieval + draft"),
        (
            {"placement": {"colocate": "draft_with_retrieval", "draft": {"cores": [0, 2]}}},
            "retrieval + draft on cores 0, 2; target (4 threads)",
        ),
        ({"server": {"host": "::1"}}, "http://[::1]:8000/v1"),
        ({"server": {"host": "0.0.0.0"}}, "http://127.0.0.1:8000/v1"),
        ({"server": {"certificate": "c.pem", "certificate_key": "k.pem"}}, "https://127.0.0.1:8000/v1"),
        ({"device": "cuda", "dtype": "bfloat16"}, "demo, bfloat16, on cuda\n"),
    ],
    ids=str,
)
def test_placement_and_addresses_as_they_are(settings: dict[str, Any], expected: str) -> None:
    assert expected in directions(load_settings(**settings), LOGS, tiers(target=4))


def test_a_server_with_keys_says_where_they_go(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-key alice\n")
    keyed, open_to_all = (
        directions(load_settings(server={"api_keys": path}), LOGS, tiers(target=1)) for path in (str(keys), None)
    )
    for words in ("an API key as the password", "authorization: Bearer <key>"):
        assert words in keyed
        assert words not in open_to_all


@pytest.mark.parametrize(
    ("least_ms", "max_stall_ms", "told"), [(900, 200, True), (150, 200, False), (900, "off", False)]
)
def test_a_stall_above_the_setting_is_told(least_ms: float, max_stall_ms: float | str, told: bool) -> None:
    settings = load_settings(target={"max_stall_ms": max_stall_ms})
    said = directions(settings, LOGS, [{"tier": "target", "least_stall_ms": least_ms}])
    assert ("delays other requests by 900 ms a pass, above target.max_stall_ms 200" in said) == told


def test_a_server_that_does_not_answer_has_no_threads_to_tell() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        assert tiers_found(load_settings(server={"port": nobody.getsockname()[1]})) == []


def test_the_request_to_try_is_one_that_works(server: Server) -> None:
    settings = load_settings(server={"port": server.port})
    assert {tier["tier"]: tier["threads"] for tier in tiers_found(settings)} == {
        "draft": 1,
        "retrieval": 1,
        "target": 1,
    }
    line = re.search(r"curl -N .*", directions(settings, LOGS, []))
    assert line is not None
    _, _, url, _, header, _, body = shlex.split(line[0])
    kind = header.split(": ")
    answer = requests.post(url, data=body, headers={kind[0]: kind[1]}, timeout=60)
    events = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["text"]


def test_the_front_alone_has_the_server_s_address(server: Server) -> None:
    """Everything else listens on the loopback, and Serve's own port of a replica wants Ray's token."""
    ours = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    links = [(each.name(), link) for each in ours for link in each.net_connections("tcp")]
    found = [(name, link.laddr) for name, link in links if link.status == "LISTEN"]
    assert {address.ip.removeprefix("::ffff:") for _, address in found} == {"127.0.0.1"}
    public = {address.port for name, address in found if name == "haproxy"}
    assert public == {server.port, server.grpc_port}
    assert not public & {address.port for name, address in found if name != "haproxy"}
    refusals = []
    for _, address in found:
        with grpc.insecure_channel(f"127.0.0.1:{address.port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as refusal:
                call(b"", timeout=5)
            refusals.append(refusal.value.code())
    assert refusals.count(grpc.StatusCode.UNAUTHENTICATED) >= 2, "the gateway's and the replica's"
