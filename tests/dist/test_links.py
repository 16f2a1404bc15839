"""The upper end of a link by itself: peers that are not there, answers that nobody waits for, and shutting down."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import grpc
import pytest

from actors.links import RemoteProposer
from actors.serving import LinkServer, TierServer
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import TierStub
from triforce_core.doorbell import Doorbell
from triforce_core.messages import GREEDY, SequenceSpec, Span, Tier, Work
from triforce_core.roles import NoProposer

SPEC = SequenceSpec(GREEDY, seed=0, prompt_length=1, max_length=100)
NOBODY = "127.0.0.1:1"


def work(start: int, *tokens: int) -> Work:
    return Work(Span(1, start, tokens, None if start else SPEC), (4, 2))


def test_a_peer_that_is_not_there_is_not_ready_and_leaves_nothing_behind() -> None:
    link = RemoteProposer(lambda: NOBODY, timeout_s=1.0)
    link.retry_s = 0.01
    try:
        assert not link.wait_ready(0.5)
        assert link.arrived.qsize() == 0, "failed attempts pile up"
        link.submit([work(0, 7, 8)])
        [answer] = link.collect(1.0)
        assert (answer.tokens, answer.start, answer.missing_from) == ((), 2, 0)
    finally:
        link.close()


def test_a_link_that_is_closed_while_it_looks_for_its_peer_ends() -> None:
    tier = TierServer(NoProposer(), Tier.DRAFT, Tier.RETRIEVAL)
    server = LinkServer("127.0.0.1", tier)
    asked, go_on = threading.Event(), threading.Event()

    def resolve() -> str:
        asked.set()
        go_on.wait(5.0)
        return server.address

    link = RemoteProposer(resolve, timeout_s=1.0)
    assert asked.wait(5.0)
    threading.Timer(0.2, go_on.set).start()
    link.close()
    assert not link.thread.is_alive()
    server.stop()
    tier.stop()


def test_a_ring_ends_the_wait_even_when_what_came_is_of_no_use() -> None:
    """The ring may have been for another inbox as well."""
    bell = Doorbell()
    link = RemoteProposer(lambda: NOBODY, timeout_s=1.0, doorbell=bell)
    assert not link.wait_ready(0.1)
    late = pb.ProposalBatch(proposals=[pb.Proposal(sequence_id=9, start=5)])
    link.arrived.put((link.stream, late))  # type: ignore[arg-type]
    bell.ring()
    begin = time.monotonic()
    assert link.collect(5.0) == []
    assert time.monotonic() - begin < 2.0
    link.close()


def test_what_replaced_work_stated_is_missing_too() -> None:
    tier = TierServer(NoProposer(), Tier.DRAFT, Tier.RETRIEVAL)
    tier.stop()  # takes nothing in: the peer hangs
    server = LinkServer("127.0.0.1", tier)
    link = RemoteProposer(lambda: server.address, timeout_s=0.3)
    assert link.wait_ready(10.0)
    link.submit([work(3, 7, 8)])
    link.submit([work(5, 9)])
    [answer] = link.collect(5.0)
    assert (answer.start, answer.missing_from) == (6, 3)
    link.close()
    server.stop(0.0)


SERVE_UNTIL_TOLD = """
import sys
from actors.serving import LinkServer, TierServer
from triforce_core.messages import Tier

class NoProposer:
    def submit(self, work): ...
    def collect(self, timeout_s): return []
    def release(self, sequence_ids): ...

print(LinkServer("127.0.0.1", TierServer(NoProposer(), Tier.DRAFT, Tier.RETRIEVAL)).address, flush=True)
sys.stdin.readline()
sys.exit(3)
"""


def test_a_tier_process_exits_though_a_link_is_open() -> None:
    """Else Ray starts its successor while it goes on serving."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE_UNTIL_TOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        link = RemoteProposer(lambda: address, timeout_s=5.0)
        assert link.wait_ready(10.0)
        process.communicate("exit\n", timeout=10)
        assert process.returncode == 3
        link.close()
    finally:
        process.kill()


def test_a_fault_of_ours_ends_the_link_as_one(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(batch: pb.WorkBatch) -> None:
        raise RuntimeError("of ours")

    monkeypatch.setattr("actors.serving.work_batch_from_proto", fail)
    tier = TierServer(NoProposer(), Tier.DRAFT, Tier.RETRIEVAL)
    server = LinkServer("127.0.0.1", tier)
    with grpc.insecure_channel(server.address) as channel:
        call = TierStub(channel).Propose(iter([pb.WorkBatch()]))
        with pytest.raises(grpc.RpcError):
            list(call)
        assert call.code() == grpc.StatusCode.INTERNAL
    assert "of ours" in caplog.text
    server.stop(0.0)
    tier.stop()


def test_more_links_than_there_may_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.serving.MAX_LINKS", 1)
    tier = TierServer(NoProposer(), Tier.DRAFT, Tier.RETRIEVAL)
    server = LinkServer("127.0.0.1", tier)
    link = RemoteProposer(lambda: server.address, timeout_s=1.0)
    assert link.wait_ready(10.0)
    with grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
            TierStub(channel).Status(pb.StatusRequest(), timeout=5.0)
    link.close()
    server.stop(0.0)
    tier.stop()
