"""The upper end of a link by itself: peers that are not there, answers that nobody waits for, and shutting down."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from actors import links
from actors.admission import Address
from actors.links import CHANNEL_OPTIONS, RETRY_S, RemoteProposer
from actors.serving import LinkServer, TierServer
from actors.wire import Bounds, proposal_batch_to_proto
from tests.by_hand import NoProposer
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import TierStub
from triforce_core.doorbell import Doorbell
from triforce_core.messages import GREEDY, Proposal, SequenceSpec, Span, Tier, Work

SPEC = SequenceSpec(GREEDY, seed=0, prompt_length=1, max_length=100)
NOBODY = Address("127.0.0.1:1", "")


def work(start: int, *tokens: int) -> Work:
    return Work(Span(1, start, tokens, None if start else SPEC), (4, 2))


@contextmanager
def serving(proposer: Any = None) -> Iterator[tuple[LinkServer, TierServer]]:
    tier = TierServer(proposer or NoProposer(), Tier.DRAFT, Tier.RETRIEVAL)
    server = LinkServer("127.0.0.1", tier)
    try:
        yield server, tier
    finally:
        server.stop(0.0)
        tier.stop()


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
    with serving() as (server, _):
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


def test_a_ring_ends_the_wait_even_when_what_came_is_of_no_use() -> None:
    """The doorbell may have rung for another inbox as well."""
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

server = LinkServer("127.0.0.1", TierServer(NoProposer(), Tier.DRAFT, Tier.RETRIEVAL))
print(*server.address, flush=True)
sys.stdin.readline()
sys.exit(3)
"""


@contextmanager
def process(code: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that runs `code`, and the first line that it prints."""
    started = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert started.stdout is not None
        yield started, started.stdout.readline().strip()
    finally:
        started.kill()
        started.communicate()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> float:
    """Wait, and return how many seconds it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout_s, f"not within {timeout_s} s"
        time.sleep(0.01)
    return time.monotonic() - begin


def with_pings_every(milliseconds: int) -> list[tuple[str, int]]:
    """The options of a connection, with `milliseconds` in place of the ten seconds of its pings."""
    return [(name, milliseconds if value == 10_000 else value) for name, value in CHANNEL_OPTIONS]


def test_a_tier_process_exits_though_a_link_is_open() -> None:
    """If the process went on serving, Ray would start its successor beside it."""
    with process(SERVE_UNTIL_TOLD) as (server, address):
        link = RemoteProposer(lambda: Address(*address.split()), timeout_s=5.0)
        assert link.wait_ready(10.0)
        server.communicate("exit\n", timeout=10)
        assert server.returncode == 3
        link.close()


def test_a_peer_that_takes_the_connection_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link asks for the address again: by then another process may serve in the peer's place."""
    monkeypatch.setattr(links, "OPEN_S", 0.3)
    with serving() as (server, _), socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        addresses = [Address(f"127.0.0.1:{mute.getsockname()[1]}", ""), server.address]
        link = RemoteProposer(lambda: addresses.pop(0), timeout_s=60.0)
        link.retry_s = 0.01
        assert link.wait_ready(10.0), "it hangs at the first"
        link.close()


def test_an_address_that_never_comes_is_asked_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LOOK_UP_S", 0.2)
    with serving() as (server, _):
        never, asked = threading.Event(), list[int]()

        def resolve() -> str:
            asked.append(1)
            if len(asked) == 1:
                never.wait()
            return server.address

        link = RemoteProposer(resolve, timeout_s=60.0)
        assert link.wait_ready(10.0)
        link.close()
        never.set()


def test_a_link_can_be_closed_while_its_address_does_not_come() -> None:
    never = threading.Event()

    def resolve() -> str:
        never.wait()
        return NOBODY

    link = RemoteProposer(resolve, timeout_s=60.0)
    begin = time.monotonic()
    link.close()
    assert not link.thread.is_alive()
    assert not link.watch.is_alive()
    assert time.monotonic() - begin < 2.0
    never.set()


def test_a_hung_peer_is_noticed_though_nobody_asks_it_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's system takes what is sent and answers nothing, as where a node vanishes. The link is back when the
    peer goes on.
    """
    monkeypatch.setattr(links, "CHANNEL_OPTIONS", with_pings_every(200))
    monkeypatch.setattr(links, "OPEN_S", 0.3)
    with process(SERVE_UNTIL_TOLD) as (server, address):
        link = RemoteProposer(lambda: Address(*address.split()), timeout_s=60.0)
        assert link.wait_ready(10.0)
        assert link.silent_s == 0
        os.kill(server.pid, signal.SIGSTOP)
        wait_until(lambda: not link.ready.is_set())
        wait_until(lambda: link.silent_s > 0.5)
        os.kill(server.pid, signal.SIGCONT)
        assert link.wait_ready(10.0)
        assert link.silent_s == 0
        link.close()


@pytest.mark.slow
def test_an_idle_link_stays_up_through_its_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC sends at most one ping a second. By default a server would close this link after a few of them."""
    monkeypatch.setattr(links, "CHANNEL_OPTIONS", with_pings_every(50))
    with serving() as (server, _):
        link = RemoteProposer(lambda: server.address, timeout_s=60.0)
        assert link.wait_ready(10.0)
        stream = link.stream
        time.sleep(7.0)
        assert link.stream is stream
        assert stream is not None
        assert stream.open
        link.close()


ASK_AND_WAIT = """
import sys
from actors.admission import Address
from actors.links import RemoteProposer
from triforce_core.messages import GREEDY, SequenceSpec, Span, Work

link = RemoteProposer(lambda: Address(*sys.argv[1:]), timeout_s=60.0)
assert link.wait_ready(10.0)
link.submit([Work(Span(1, 0, (7, 8), SequenceSpec(GREEDY, 0, 1, 100)), (4, 2))])
link.collect(10.0)
print("asked", flush=True)
sys.stdin.readline()
"""


def test_a_tier_forgets_what_a_hung_tier_above_had_it_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.serving.CHANNEL_OPTIONS", with_pings_every(200))
    with serving() as (server, tier), process(ASK_AND_WAIT, *server.address) as (client, said):
        assert said == "asked"
        assert tier.status().live_sequences == 1
        os.kill(client.pid, signal.SIGSTOP)
        wait_until(lambda: tier.status().live_sequences == 0)


class Quiet(NoProposer):
    """A tier that answers only when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()

    def collect(self, timeout_s: float) -> list[Proposal]:
        return super().collect(timeout_s) if self.may_answer.wait(min(timeout_s, 0.02)) else []


@contextmanager
def linked(proposer: Any, **options: Any) -> Iterator[tuple[RemoteProposer, LinkServer, TierServer]]:
    with serving(proposer) as (server, tier):
        link = RemoteProposer(lambda: server.address, peer="draft", **options)
        try:
            assert link.wait_ready(10.0)
            yield link, server, tier
        finally:
            link.close()


def test_what_was_asked_over_a_lost_link_is_answered_at_once() -> None:
    """The answer does not wait for the deadline, which is a minute away."""
    with linked(Quiet(), timeout_s=60.0) as (link, server, _):
        link.submit([work(3, 7, 8)])
        threading.Timer(0.1, server.stop, (0.0,)).start()
        begin = time.monotonic()
        [answer] = link.collect(20.0)
        assert time.monotonic() - begin < 5.0
        assert (answer.tokens, answer.start, answer.missing_from) == ((), 5, 3)
        assert not link.asked


def test_an_answer_that_came_before_its_link_ended_is_taken() -> None:
    """The answer and the end of the link may both come between two looks of the thread that collects."""
    with linked(Quiet(), timeout_s=60.0) as (link, *_):
        link.submit([work(0, 7, 8)])
        stream, answer = link.stream, Proposal(1, 2, (9,), b"\0")
        assert stream is not None

        class Inbox(queue.SimpleQueue[Any]):
            late = False

            def empty(self) -> bool:
                was_empty = super().empty()
                if not self.late:  # just after it was found empty
                    self.late = True
                    self.put((stream, proposal_batch_to_proto([answer])))
                    stream.close()
                return was_empty

        link.arrived = Inbox()
        assert (link.collect(5.0) or link.collect(5.0)) == [answer]


def test_a_peer_that_answers_again_is_no_longer_retried_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Quiet()
    with linked(quiet, timeout_s=0.2) as (link, *_):
        link.submit([work(0, 7, 8)])
        assert [a.missing_from for a in link.collect(10.0)] == [0]
        assert link.retry_s == 2 * RETRY_S
        wait_until(lambda: not link.ready.is_set())
        wait_until(link.ready.is_set)
        assert link.silent_s > 0, "to take a link is no answer"
        monkeypatch.setattr(links, "SILENT_S", 0.0)
        assert not link.too_silent, "nor is it silence where nothing is asked"
        link.timeout_s = 20.0
        quiet.may_answer.set()
        link.submit([work(0, 7, 8)])
        answers = link.collect(10.0) or link.collect(10.0)  # the end of the first stream rang, too
        assert [a.missing_from for a in answers] == [None]
        assert link.retry_s == RETRY_S
        assert link.silent_s == 0


def test_a_peer_that_was_started_anew_is_taken_to_be_well() -> None:
    quiet = Quiet()
    with linked(quiet, timeout_s=0.2) as (link, server, _), linked(NoProposer(), timeout_s=1.0) as (_, other, _):
        link.submit([work(0, 7, 8)])
        assert link.collect(10.0)
        assert link.retry_s > RETRY_S
        server.address = other.address
        wait_until(lambda: link.silent_s == 0)
        assert link.retry_s == RETRY_S
        assert link.address == other.address


def test_a_silent_peer_is_told_of_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "SILENT_S", 0.2)
    link = RemoteProposer(lambda: NOBODY, timeout_s=1.0, peer="draft")
    wait_until(lambda: caplog.text.count(f"the draft tier has not answered for 0 s, at {NOBODY.place}") >= 2)
    assert link.silent_s >= 0.4
    link.close()


def test_a_peer_that_answers_is_not_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with linked(NoProposer(), timeout_s=5.0) as (link, *_):
        monkeypatch.setattr(links, "SILENT_S", 0.1)
        time.sleep(0.5)
        assert link.silent_s == 0
    assert "has not answered" not in caplog.text


def test_a_fault_of_ours_ends_the_link_as_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(batch: pb.WorkBatch, bounds: Bounds) -> None:
        raise RuntimeError("of ours")

    monkeypatch.setattr("actors.serving.work_batch_from_proto", fail)
    with serving() as (server, _):
        with grpc.insecure_channel(server.address.place) as channel:
            call = TierStub(channel).Propose(iter([pb.WorkBatch()]), metadata=server.address.metadata)
            with pytest.raises(grpc.RpcError):
                list(call)
            assert call.code() == grpc.StatusCode.INTERNAL
        assert "of ours" in caplog.text


def test_more_links_than_there_may_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.serving.MAX_LINKS", 1)
    with serving() as (server, _):
        link = RemoteProposer(lambda: server.address, timeout_s=1.0)
        assert link.wait_ready(10.0)
        place, ours = server.address.place, server.address.metadata
        with grpc.insecure_channel(place) as channel, pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
            TierStub(channel).Status(pb.StatusRequest(), timeout=5.0, metadata=ours)
        link.close()


class Broken(NoProposer):
    """Every round fails."""

    def __init__(self) -> None:
        super().__init__()
        self.released: list[list[int]] = []

    def collect(self, timeout_s: float) -> list[Proposal]:
        raise RuntimeError("a broken device")

    def release(self, sequence_ids: list[int]) -> None:
        self.released.append(sequence_ids)


def test_a_round_that_fails_is_answered_empty_at_once_and_forgets_what_was_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer does not wait for the deadline, which is a minute away."""
    monkeypatch.setattr("actors.serving.os._exit", lambda code: None)
    broken = Broken()
    with linked(broken, timeout_s=60.0) as (link, *_):
        link.submit([work(0, 7, 8)])
        begin = time.monotonic()
        [answer] = link.collect(20.0)
        assert time.monotonic() - begin < 5.0
        assert (answer.sequence_id, answer.start, answer.tokens) == (1, 2, ())
        wait_until(lambda: broken.released == [[1]])
        assert link.ready.is_set(), "the link is not to blame"


SERVE_BROKEN = """
import sys, time
from actors import serving
from actors.serving import LinkServer, TierServer
from triforce_core.messages import Tier

class Broken:
    def submit(self, work): ...
    def collect(self, timeout_s): raise RuntimeError("a broken device")
    def release(self, sequence_ids):
        if sys.argv[1] == "release":
            raise RuntimeError("nor can it be given up")

server = LinkServer("127.0.0.1", TierServer(Broken(), Tier.DRAFT, Tier.RETRIEVAL))
print(*server.address, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("broken", "rounds"), [("collect", 5), ("release", 1)])
def test_a_tier_whose_rounds_all_fail_ends_its_process(broken: str, rounds: int) -> None:
    """Ray then starts another process. It ends after five failures in a row, or at once if it cannot give up what it
    holds.
    """
    with process(SERVE_BROKEN, broken) as (server, address):
        link = RemoteProposer(lambda: Address(*address.split()), timeout_s=60.0)
        assert link.wait_ready(10.0)
        for _ in range(rounds):
            with pytest.raises(subprocess.TimeoutExpired):  # it goes on
                server.wait(0.5)
            link.submit([work(0, 7, 8)])
            answers = link.collect(10.0) or link.collect(10.0)
            assert [a.tokens for a in answers] == [()]
        assert server.wait(10.0) == 1
        link.close()


class Recovering(NoProposer):
    """Of every five rounds with work, four fail."""

    rounds = 0

    def collect(self, timeout_s: float) -> list[Proposal]:
        self.rounds += 1
        if self.rounds % 5:
            raise RuntimeError("this time")
        return super().collect(timeout_s)


def test_failures_are_counted_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr("actors.serving.os._exit", lambda code: ended.set())
    with linked(Recovering(), timeout_s=60.0) as (link, *_):
        for _ in range(12):
            link.submit([work(0, 7, 8)])
            assert link.collect(10.0)
    assert not ended.is_set()


def test_what_another_link_has_taken_over_is_not_released_with_the_first() -> None:
    """A tier above that is started anew states its sequences over a new link before its old link has ended."""
    proposer = Broken()
    proposer.collect = lambda timeout_s: []  # type: ignore[method-assign]
    with linked(proposer, timeout_s=60.0) as (old, server, tier):
        new = RemoteProposer(lambda: server.address, timeout_s=60.0)
        assert new.wait_ready(10.0)
        old.submit([work(0, 7, 8), Work(Span(2, 0, (7,), SPEC), (4, 2))])
        wait_until(lambda: tier.status().live_sequences == 2)
        new.submit([work(0, 7, 8)])
        wait_until(lambda: tier.counters.work_items == 3)
        old.close()
        wait_until(lambda: tier.status().live_sequences == 1)
        assert list(tier.served) == [1]
        assert proposer.released == [[2]]
        new.close()
        wait_until(lambda: tier.status().live_sequences == 0)
        assert proposer.released == [[2], [1]]
        assert not tier.served
