"""Random messages at every method of the gRPC services: each gets an answer or a typed error."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploy.gateway import Gateway
from deploy.health import Health
from deploy.keys import keys_of
from tests.random_messages import messages
from tests.scripted import Scripted, event, ids, served
from triforce_core._gen.triforce.v1 import generation_pb2 as pb
from triforce_core._gen.triforce.v1 import tiers_pb2 as tiers_pb
from triforce_core.errors import FingerprintError

SERVICES = (pb.DESCRIPTOR.services_by_name["Generation"], health_pb2.DESCRIPTOR.services_by_name["Health"])
METHODS = {method.name: method for service in SERVICES for method in service.methods}
STATUSES = {  # that a client's message may lead to; a server of ours never answers UNKNOWN, nor INTERNAL
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "RESOURCE_EXHAUSTED",
    "DEADLINE_EXCEEDED",
    "UNAVAILABLE",  # only where the pipelines say so
    "FAILED_PRECONDITION",  # a fingerprint that the client claims
}


MENDED: dict[str, Any] = {"model": "", "text": "def main():", "sampling": None, "max_tokens": 3, "service": ""}


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, Any]:
    """A method and a request for it. Some fields are sound, because otherwise hardly any request would be sound as a
    whole.
    """
    name = draw(st.sampled_from(sorted(METHODS)))
    request: Any = draw(messages(METHODS[name].input_type))
    for field, value in MENDED.items():
        if field in request.DESCRIPTOR.fields_by_name and draw(st.integers(0, 3)):
            request.ClearField(field)
            if value is not None:
                setattr(request, field, value)
    return name, request


class Context:
    """What Serve gives to a method."""

    code = grpc.StatusCode.OK

    def peer(self) -> str:
        return "ipv4:127.0.0.1:50000"

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return []

    def trailing_metadata(self) -> list[tuple[str, str]]:
        return []

    def set_trailing_metadata(self, metadata: list[tuple[str, str]]) -> None:
        assert metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        assert details


class Up(Scripted):
    """This pipeline refuses fingerprints other than its own, as a target does."""

    async def decode(self, request: tiers_pb.DecodeRequest) -> AsyncGenerator[tiers_pb.DecodeEvent, None]:
        if request.fingerprint:
            raise FingerprintError(f"fingerprint: {request.fingerprint!r} is not what is served here")
        async with aclosing(super().decode(request)) as events:
            async for each in events:
                yield each

    async def check(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.journal.CLAIM_S", 0.05)


@pytest.fixture(scope="module")
def gateway() -> Gateway:
    """A gateway without Ray. Its pipeline always answers the same three tokens."""
    _, service, _ = served()
    service.pipelines = Up(event(ids("a b")), event(ids(" c"), pb.FINISH_REASON_LENGTH))
    gateway = Gateway.__new__(Gateway)
    gateway.service, gateway.health, gateway.keys = service, Health(service), keys_of(None)
    return gateway


async def status_of(gateway: Gateway, name: str, request: Any) -> str:
    """The status with which the method answers. A watch is left after its first message."""
    context, method = Context(), getattr(gateway, name)
    answer = method(request.SerializeToString(), context)
    if METHODS[name].server_streaming:
        async for item in answer:
            assert item.DESCRIPTOR is METHODS[name].output_type
            if name == "Watch":
                break
        await answer.aclose()
    else:
        assert (await answer).DESCRIPTOR is METHODS[name].output_type
    return context.code.name


SEEN: Counter[tuple[str, str]] = Counter()


@settings(max_examples=800, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(requests())
def test_no_message_leads_to_an_unknown_error(gateway: Gateway, asked: tuple[str, Any]) -> None:
    name, request = asked
    status = asyncio.run(asyncio.wait_for(status_of(gateway, name, request), 60))
    assert status in STATUSES, f"{name}({request}): {status}"
    assert gateway.service.in_flight == gateway.health.watches.total() == 0
    SEEN[name, status] += 1


def test_the_messages_reached_what_lies_behind_the_checks() -> None:
    """If they did not, the test above would show little."""
    if not SEEN:
        pytest.skip("run together with the test above")
    assert SEEN["GenerateStream", "OK"] > 20
    assert SEEN["Tokenize", "OK"] > 20
    assert SEEN["GenerateStream", "INVALID_ARGUMENT"] > 20


@pytest.mark.parametrize("name", sorted(METHODS))
def test_bytes_that_are_no_message_are_refused(gateway: Gateway, name: str) -> None:
    context, method, empty = Context(), getattr(gateway, name), GetMessageClass(METHODS[name].output_type)()

    async def answered() -> None:
        answer = method(b"\xff\xff", context)
        if METHODS[name].server_streaming:
            assert [item async for item in answer] == [empty]
        else:
            assert await answer == empty

    asyncio.run(answered())
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
