"""Calls of tiers without their secret: refused at once and counted, over links and at the target."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from actors.admission import SECRET, Address
from actors.links import RemoteProposer
from actors.serving import LinkServer, TierServer
from actors.target_server import AsyncServer
from tests.unit.actors.test_target_server import Counting, NoProposer, check, served
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import TargetStub, TierStub
from triforce_core.errors import UnavailableError
from triforce_core.messages import Tier

Server = LinkServer | AsyncServer


@contextmanager
def link_server() -> Iterator[LinkServer]:
    tier = TierServer(NoProposer(), Tier.DRAFT, Tier.RETRIEVAL)
    server = LinkServer("127.0.0.1", tier)
    try:
        yield server
    finally:
        server.stop(0.0)
        tier.stop()


@contextmanager
def either(kind: str) -> Iterator[Server]:
    if kind == "link":
        with link_server() as server:
            yield server
    else:
        with served(NoProposer(), Counting()) as (_, target):
            yield target


def calls(kind: str, channel: grpc.Channel, metadata: Any) -> list[Any]:
    """One call of each method, as functions that wait for the first answer."""
    never = iter(queue.SimpleQueue[pb.WorkBatch | None]().get, None)  # a caller that sends nothing
    if kind == "link":
        stub = TierStub(channel)
        return [
            lambda: next(stub.Propose(never, metadata=metadata, timeout=5)),
            lambda: stub.Status(pb.StatusRequest(), metadata=metadata, timeout=5),
        ]
    target = TargetStub(channel)
    return [
        lambda: next(target.Decode(pb.DecodeRequest(), metadata=metadata, timeout=5)),
        lambda: target.Status(pb.StatusRequest(), metadata=metadata, timeout=5),
    ]


@pytest.mark.parametrize("kind", ["link", "target"])
def test_calls_without_the_secret_are_refused_and_counted(kind: str) -> None:
    with either(kind) as other:
        old = other.address.secret
    with either(kind) as server, grpc.insecure_channel(server.address.place) as channel:
        right = server.address.secret
        wrong: list[Any] = [
            (),
            ((SECRET, ""),),
            ((SECRET, old),),
            ((SECRET, right[:-1]),),
            ((SECRET, right), (SECRET, right)),
            (("authorization", f"Bearer {right}"),),
        ]
        for metadata in wrong:
            for call in calls(kind, channel, metadata):
                with pytest.raises(grpc.RpcError) as refusal:
                    call()
                assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert server.admission.refused == 2 * len(wrong)
        status = calls(kind, channel, server.address.metadata)[1]()
        assert status.ready
        assert server.admission.refused == 2 * len(wrong)


def test_a_link_with_an_old_secret_looks_the_address_up_again() -> None:
    with link_server() as server:
        addresses = [server.address._replace(secret="old"), server.address]
        link = RemoteProposer(lambda: addresses.pop(0), timeout_s=5.0)
        link.retry_s = 0.01
        assert link.wait_ready(10.0)
        assert server.admission.refused == 1
        link.close()


def test_a_target_with_another_secret_is_gone() -> None:
    """Another process has its port: the request is not to blame."""
    with served(NoProposer(), Counting()) as (_, server), pytest.raises(UnavailableError) as error:
        check(server.address._replace(secret="old"))
    assert not error.value.suspect


def test_refusals_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with link_server() as server, grpc.insecure_channel(server.address.place) as channel:
        for _ in range(20):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(f"/{'a' * 5000}")(b"", timeout=5)
        assert server.admission.refused == 20
    [line] = [record.getMessage() for record in caplog.records if record.name == "actors.admission"]
    assert len(line) < 300


def test_an_address_can_be_logged() -> None:
    assert "hidden" not in f"{Address('127.0.0.1:1', 'hidden')!r} {Address('127.0.0.1:1', 'hidden')}"
