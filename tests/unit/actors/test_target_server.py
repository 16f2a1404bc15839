"""The thread that runs the engine: whether it is said to be ready when its pipeline asks over gRPC."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from actors import pass_times
from actors.admission import Address
from actors.links import RemoteProposer
from actors.marks import SLOT
from actors.running_target import RunningTarget
from actors.serving import LinkServer, TierServer
from actors.target_server import AsyncServer, TargetServer
from actors.wire import sampling_to_proto
from tests.by_hand import Counting, NoProposer, Slots
from tests.unit.actors.test_links import Quiet
from triforce_core._gen.triforce.v1 import generation_pb2 as gen
from triforce_core._gen.triforce.v1 import tiers_pb2 as pb
from triforce_core._gen.triforce.v1.tiers_pb2_grpc import TargetStub
from triforce_core.doorbell import Doorbell
from triforce_core.engine.engine import Engine
from triforce_core.engine.limits import Limits
from triforce_core.engine.scheduler import Scheduler
from triforce_core.engine.sequence import FinishReason, Output, Request, Sequence, Stats
from triforce_core.errors import DeadlineError, InvalidValueError, UnavailableError
from triforce_core.messages import GREEDY, Claim, Proposer, Tally, Tier, Verdict
from triforce_core.speculation.decoder import SpeculativeDecoder


class Hanging(Counting):
    """A target whose passes end only while `may_end` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()
        self.may_end.set()

    def verify(self, claims: list[Claim]) -> list[Verdict]:
        self.may_end.wait()
        return super().verify(claims)


class NoSnapshots:
    selector = "streaming"

    def update(self, sequence: object, *, wanted: bool) -> None:
        """No snapshot is ever due."""

    def saw(self, sequence: object, tally: Tally) -> None:
        """Nothing depends on the tally."""


@contextmanager
def served(
    below: Proposer, verifier: Counting, doorbell: Doorbell | None = None
) -> Iterator[tuple[TargetServer, AsyncServer]]:
    scheduler = Scheduler(Slots(10**6), max_sequences=2, prefill_chunk=64)
    decoder = SpeculativeDecoder(below, verifier)
    engine = Engine(decoder, scheduler, NoSnapshots(), Limits(10**5, 10**6, 10**5), doorbell=doorbell)  # type: ignore[arg-type]
    target = TargetServer(engine, (0, 0))
    server = AsyncServer("127.0.0.1", target)
    try:
        yield target, server
    finally:
        server.stop(0.0)
        target.stop()


def check(address: Address, timeout_s: float = 5.0) -> None:
    """Check the target as the owner of a pipeline does."""

    async def connected() -> None:
        target = RunningTarget(address, os.getpid(), None)
        try:
            await target.check(timeout_s)
        finally:
            await target.close()

    asyncio.run(connected())


def decode(target: TargetServer, max_tokens: int, lookaheads: tuple[int, int] = (0, 0)) -> threading.Event:
    """Submit a request, and return an event that is set at its end."""
    done = threading.Event()

    def deliver(output: Output | None) -> None:
        if output is None or output.finish_reason:
            done.set()

    target.engine_thread.submit(Request((1, 2, 3), max_tokens, GREEDY, 0, lookaheads), deliver)
    return done


def test_a_hung_pass_is_not_ready_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_times, "LEAST_S", 0.3)
    verifier = Hanging()
    with served(NoProposer(), verifier) as (target, server):
        assert decode(target, 20).wait(10)
        check(server.address)
        verifier.may_end.clear()
        done = decode(target, 20)
        time.sleep(0.1)
        check(server.address)
        time.sleep(0.5)
        with pytest.raises(UnavailableError, match="the target tier has failed, or hangs"):
            check(server.address)
        verifier.may_end.set()
        assert done.wait(10)
        check(server.address)
        time.sleep(0.5)
        check(server.address)


def test_waiting_for_the_tier_below_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier below may hang for as long as the link to it has patience."""
    monkeypatch.setattr(pass_times, "LEAST_S", 0.3)
    bell = Doorbell()
    tier = TierServer(Quiet(), Tier.RETRIEVAL, Tier.TARGET)
    below = LinkServer("127.0.0.1", tier)
    link = RemoteProposer(lambda: below.address, timeout_s=1.5, doorbell=bell)
    assert link.wait_ready(10)
    with served(link, Counting(), bell) as (target, _):
        assert decode(target, 20).wait(10)
        done = decode(target, 4, (2, 0))
        while not link.asked:
            time.sleep(0.01)
        until = time.monotonic() + 1.2
        while time.monotonic() < until:
            assert target.status().ready
            time.sleep(0.01)
        assert done.wait(20)
    link.close()
    below.stop(0.0)
    tier.stop()


def stream(address: Address, **fields: Any) -> list[pb.DecodeEvent]:
    """Send a request as the owner of a pipeline does, and return its events."""

    async def events() -> list[pb.DecodeEvent]:
        request = pb.DecodeRequest(prompt_token_ids=[1, 2, 3], sampling=sampling_to_proto(GREEDY), **fields)
        target = RunningTarget(address, os.getpid(), None)
        try:
            return [pb.DecodeEvent.FromString(event) async for event in target.decode(request.SerializeToString())]
        finally:
            await target.close()

    return asyncio.run(events())


def test_a_closed_connection_is_no_cancellation_and_the_other_way_round() -> None:
    """Whoever cancels a request gets no error of ours, also where its connection is closed at the same time."""
    verifier = Hanging()

    async def ended(address: Address, *, cancelled: bool) -> BaseException | None:
        target = RunningTarget(address, os.getpid(), None)
        asked = pb.DecodeRequest(prompt_token_ids=[1, 2, 3], sampling=sampling_to_proto(GREEDY), max_tokens=20)

        async def read() -> None:
            async for _ in target.decode(asked.SerializeToString()):
                reading.set()

        reading = asyncio.Event()
        task = asyncio.create_task(read())
        await reading.wait()
        if cancelled:
            task.cancel()
        await target.close()
        [found] = await asyncio.gather(task, return_exceptions=True)
        return found

    with served(NoProposer(), verifier) as (_, server):
        verifier.may_end.clear()
        assert isinstance(asyncio.run(ended(server.address, cancelled=False)), UnavailableError)
        assert isinstance(asyncio.run(ended(server.address, cancelled=True)), asyncio.CancelledError)
        verifier.may_end.set()


def test_a_request_at_which_the_engine_fails_is_suspect_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(NoProposer(), Counting()) as (target, server):
        other, add, faults = decode(target, 500), Scheduler.add, iter([RuntimeError("a fault")])
        while not target.engine_thread.engine.scheduler.live:
            time.sleep(0.001)

        def broken(scheduler: Scheduler, sequence: Sequence) -> None:
            for fault in faults:
                raise fault
            add(scheduler, sequence)

        monkeypatch.setattr(Scheduler, "add", broken)
        with pytest.raises(UnavailableError) as failed:
            stream(server.address, max_tokens=5)
        assert failed.value.suspect
        assert other.wait(30)
        assert stream(server.address, max_tokens=5)[-1].finish_reason
        check(server.address)


def test_a_request_that_the_engine_ends_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(NoProposer(), Counting()) as (target, server):
        assert stream(server.address, max_tokens=5, timeout_s=60, priority=-5)[-1].finish_reason
        ended = Output(2, (), b"", FinishReason.DEADLINE, Stats())
        monkeypatch.setattr(target.engine_thread.engine, "run_once", lambda timeout_s: [ended])
        with pytest.raises(DeadlineError, match=r"not done within 1\.5 s"):
            stream(server.address, max_tokens=5, timeout_s=1.5)
        assert not target.engine_thread.callbacks


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"timeout_s": 0.0}, r"^timeout_s: 0\.0 must be above 0"),
        ({"timeout_s": -0.25}, r"^timeout_s: -0\.25 must be above 0"),
        ({"timeout_s": float("nan")}, "^timeout_s: nan must be above 0"),
        ({"timeout_s": float("inf")}, "^timeout_s: inf must be above 0 and finite"),
        ({"priority": -101}, "^priority: -101 must be at least -100"),
        ({"logprobs": 2**32 - 1}, "^logprobs: 4294967295 must be between 0"),
        ({"lookaheads": gen.Lookaheads(values=[2**32 - 1, 1])}, "^lookaheads: .* must each be at most 64"),
        ({"resume_token_ids": [2**31]}, "^resume_token_ids: 2147483648 is not a token id"),
        ({"stop_token_ids": range(257)}, "^stop_token_ids: 257 must hold at most 256"),
        ({"grammar": "a" * (2**22 + 1)}, "^grammar: '4194305 characters' must be at most"),
        ({"cache_salt": "a" * 4097}, "^cache_salt: 4097 must be at most 4096 characters"),
    ],
)
def test_a_value_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with served(NoProposer(), Counting()) as (_, server), pytest.raises(InvalidValueError, match=message):
        stream(server.address, max_tokens=5, **fields)


@pytest.mark.parametrize("slot", ["", "x", "-1", "1.5", "9" * 5000])
def test_a_slot_that_is_no_number_is_refused(slot: str) -> None:
    request = pb.DecodeRequest(prompt_token_ids=[1], sampling=sampling_to_proto(GREEDY), max_tokens=1)
    with served(NoProposer(), Counting()) as (_, server), grpc.insecure_channel(server.address.place) as channel:
        stub, ours = TargetStub(channel), server.address.metadata
        with pytest.raises(grpc.RpcError) as refusal:
            list(stub.Decode(request, metadata=((SLOT, slot), *ours), timeout=10))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert list(TargetStub(channel).Decode(request, metadata=((SLOT, "7"), *server.address.metadata), timeout=10))[
            -1
        ].finish_reason


def test_a_target_that_reports_too_late_is_unavailable() -> None:
    """A check has a deadline, but no request has missed one: the error is `UnavailableError`."""

    with served(NoProposer(), Counting()) as (_, server):
        check(server.address)
        server.loop.call_soon_threadsafe(time.sleep, 1.0)
        with pytest.raises(UnavailableError, match="the target tier cannot serve"):
            check(server.address, 0.3)


class Failing(Counting):
    def verify(self, claims: list[Claim]) -> list[Verdict]:
        raise RuntimeError("a broken device")


def test_a_failed_engine_is_not_ready() -> None:
    with served(NoProposer(), Failing()) as (target, server):
        check(server.address)
        assert decode(target, 20).wait(10)
        with pytest.raises(UnavailableError):
            check(server.address)


def test_an_engine_knows_how_large_its_next_pass_is_at_most() -> None:
    """The engine counts prompt chunks, and rounds of decoding with all that may be drafted for them. It does not count
    tokens that the target holds already.
    """
    seen: list[tuple[int, int]] = []

    class Looking(Counting):
        def verify(self, claims: list[Claim]) -> list[Verdict]:
            seen.append((engine.asked_tokens, sum(len(c.span.tokens) + len(c.proposed) for c in claims)))
            return super().verify(claims)

    with served(NoProposer(), Looking()) as (target, _):
        engine: Any = target.engine_thread.engine
        done = threading.Event()
        target.engine_thread.submit(Request((1,) * 150, 3, GREEDY, 0, (0, 0)), lambda o: done.set() if o else None)
        assert done.wait(10)
        assert [asked for asked, _ in seen[:3]] == [64, 64, 22]
        assert all(asked == taken for asked, taken in seen)
        seen.clear()
        assert decode(target, 4, (5, 3)).wait(10)
        assert {asked for asked, _ in seen[1:]} == {9}, "one token is new; a block of 4 may grow by 3 and one more"


def test_a_request_is_told_its_way_to_the_first_pass_and_the_fingerprint_of_the_target() -> None:
    request = pb.DecodeRequest(
        prompt_token_ids=[1, 2, 3], sampling=sampling_to_proto(GREEDY), max_tokens=2, lookaheads={"values": [0, 0]}
    )
    verifier = Hanging()
    verifier.may_end.clear()
    with served(NoProposer(), verifier) as (target, server), grpc.insecure_channel(server.address.place) as channel:
        target.fingerprint = "fp_1"
        stub, ours = TargetStub(channel), server.address.metadata
        events = stub.Decode(request, metadata=ours)
        assert next(events) == pb.DecodeEvent(fingerprint="fp_1")
        assert next(events) == pb.DecodeEvent(entered=True), "before the pass ends, which may be never"
        verifier.may_end.set()
        rest = list(events)
        assert sum(len(event.token_ids) for event in rest) == 2
        assert not any(event.entered or event.fingerprint for event in rest)
        assert not target.engine_thread.entering
        request.fingerprint = "fp_1"
        assert len(list(stub.Decode(request, metadata=ours))) >= 3
        request.fingerprint = "fp_2"
        with pytest.raises(grpc.RpcError, match="fingerprint: 'fp_2' is not what is served here, 'fp_1'") as refused:
            list(stub.Decode(request, metadata=ours))
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
