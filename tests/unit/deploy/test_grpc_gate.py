"""The gate in front of the gRPC services, with a real server and client, as Serve's proxy has it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from deploy import grpc_gate
from deploy.grpc_gate import KEYS, Gate

LIMIT = 1 << 20
LONG = ("grpc.max_receive_message_length", -1)
KEY = (("authorization", "Bearer alice-key"),)


class Service:
    def __init__(self) -> None:
        self.got: list[int] = []  # lengths of messages
        self.ended = self.cancelled = 0

    async def once(self, message: bytes, context: Any) -> bytes:
        self.got.append(len(message))
        return b"answer"

    async def long(self, message: bytes, context: Any) -> bytes:
        self.got.append(len(message))
        return bytes(100 << 20)

    async def flood(self, message: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            for _ in range(100_000):
                yield bytes(100_000)
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.ended += 1


def served(check: Callable[[aio.Channel, Service], Awaitable[None]], *, is_open: bool = False) -> None:
    """Run the check against a server behind a gate."""

    async def run() -> None:
        service = Service()
        server = aio.server(options=[("grpc.max_receive_message_length", LIMIT)])
        handlers = {
            "/a/Once": grpc.unary_unary_rpc_method_handler(service.once),
            "/a/Long": grpc.unary_unary_rpc_method_handler(service.long),
            "/a/Flood": grpc.unary_stream_rpc_method_handler(service.flood),
        }
        server.add_generic_rpc_handlers((Gate(handlers, is_open=is_open),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with aio.insecure_channel(f"127.0.0.1:{port}", options=[LONG]) as channel:
                await check(channel, service)
        finally:
            await server.stop(0)

    asyncio.run(asyncio.wait_for(run(), 30))


async def code(call: Awaitable[Any]) -> str:
    try:
        await call
    except aio.AioRpcError as error:
        return error.code().name
    return "OK"


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("alice: alice-key\nbob: bob-key\n")
    monkeypatch.setenv(KEYS, str(path))


def test_a_proxy_does_not_load_torch() -> None:
    """Serve's proxies, one on each node, import the services: torch would cost each 170 MiB, and seconds of a start."""
    program = "import sys, deploy.grpc_services; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_a_key_no_message_is_read() -> None:
    async def check(channel: aio.Channel, service: Service) -> None:
        for path in ("/a/Once", "/a/Flood"):
            once = channel.unary_unary(path)
            # Where the message is read, its length is found first.
            assert await code(once(bytes(LIMIT + 1), metadata=KEY)) == "RESOURCE_EXHAUSTED"
            assert await code(once(bytes(LIMIT + 1))) == "UNAUTHENTICATED"
            assert await code(once(b"", metadata=(*KEY, *KEY))) == "UNAUTHENTICATED"
        assert await channel.unary_unary("/a/Once")(b"abc", metadata=KEY) == b"answer"
        assert await code(channel.unary_unary("/a/Other")(b"")) == "UNIMPLEMENTED"
        assert service.got == [3]

    served(check)


def test_a_refused_call_has_its_id() -> None:
    async def check(channel: aio.Channel, service: Service) -> None:
        with pytest.raises(aio.AioRpcError) as refused:
            await channel.unary_unary("/a/Once")(b"", metadata=(("x-request-id", "my-id"),))
        assert dict(refused.value.trailing_metadata())["x-request-id"] == "my-id"

    served(check)


def test_a_service_that_needs_no_key_takes_short_messages() -> None:
    async def check(channel: aio.Channel, service: Service) -> None:
        once = channel.unary_unary("/a/Once")
        assert await once(bytes(1024)) == b"answer"
        assert await code(once(bytes(1025))) == "INVALID_ARGUMENT"
        assert service.got == [1024]

    served(check, is_open=True)


@pytest.mark.parametrize(
    ("limit", "is_open"),
    [("MAX_CALLS", False), ("MAX_CALLS_PER_KEY", False), ("MAX_OPEN_CALLS_PER_HOST", True)],
)
def test_calls_are_counted(monkeypatch: pytest.MonkeyPatch, limit: str, is_open: bool) -> None:
    monkeypatch.setattr(grpc_gate, limit, 2)

    async def check(channel: aio.Channel, service: Service) -> None:
        once, flood = channel.unary_unary("/a/Once"), channel.unary_stream("/a/Flood")
        held = [flood(b"", metadata=KEY) for _ in range(2)]
        for call in held:
            await call.read()
        assert await code(once(b"", metadata=KEY)) == "RESOURCE_EXHAUSTED"
        other = await code(once(b"", metadata=(("authorization", "Bearer bob-key"),)))
        assert other == ("OK" if limit == "MAX_CALLS_PER_KEY" else "RESOURCE_EXHAUSTED")
        held[0].cancel()
        while await code(once(b"", metadata=KEY)) != "OK":  # until the server has noticed
            await asyncio.sleep(0.01)

    served(check, is_open=is_open)


def test_a_call_whose_message_does_not_come_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_gate, "MESSAGE_S", 0.3)

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    async def check(channel: aio.Channel, service: Service) -> None:
        assert await code(channel.stream_unary("/a/Once")(nothing(), metadata=KEY)) == "DEADLINE_EXCEEDED"
        assert await code(channel.stream_unary("/a/Once")(iter(()), metadata=KEY)) == "INVALID_ARGUMENT"
        assert await channel.unary_unary("/a/Once")(b"", metadata=KEY) == b"answer"

    served(check)


def test_a_stream_that_nobody_reads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_gate, "UNREAD_S", 0.5)

    async def check(channel: aio.Channel, service: Service) -> None:
        unread = channel.unary_stream("/a/Flood")(b"", metadata=KEY)
        await unread.read()
        while not service.ended:
            await asyncio.sleep(0.1)
        assert service.cancelled
        while await code(unread.read()) == "OK":  # its end follows what has been sent
            assert not unread.done()
        assert await unread.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    served(check)


def test_a_stream_that_is_cancelled_while_an_answer_is_written_cancels_its_request() -> None:
    async def check(channel: aio.Channel, service: Service) -> None:
        unread = channel.unary_stream("/a/Flood")(b"", metadata=KEY)
        await unread.read()
        await asyncio.sleep(1)  # until what is sent waits to be read
        unread.cancel()
        while not service.ended:
            await asyncio.sleep(0.01)
        assert service.cancelled

    served(check)


def test_a_stream_that_is_read_slowly_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_gate, "UNREAD_S", 3.0)

    async def check(channel: aio.Channel, service: Service) -> None:
        read = channel.unary_stream("/a/Flood")(b"", metadata=KEY)
        until = asyncio.get_running_loop().time() + 4
        while asyncio.get_running_loop().time() < until:
            assert await read.read() is not aio.EOF
            await asyncio.sleep(0.005)
        assert not service.ended

    served(check)


def test_a_long_answer_that_nobody_reads_holds_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_gate, "UNREAD_S", 1.0)
    monkeypatch.setattr(grpc_gate, "MAX_CALLS", 1)

    async def check(channel: aio.Channel, service: Service) -> None:
        unread = channel.unary_stream("/a/Long")(b"", metadata=KEY)
        while not service.got:
            await asyncio.sleep(0.01)
        assert await code(channel.unary_unary("/a/Once")(b"", metadata=KEY)) == "RESOURCE_EXHAUSTED"
        while await code(channel.unary_unary("/a/Once")(b"", metadata=KEY)) != "OK":
            await asyncio.sleep(0.1)
        assert not unread.done()

    served(check)
