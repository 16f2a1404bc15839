"""Connections that hold on to a server for as long as they can, each made again when it is cut off: `python -m
tests.slow_clients PORT GRPC_PORT EACH SECONDS`, with so many of each kind, which has an address of its own. `python -m
tests.slow_clients dummy PORT GRPC_PORT` is a server that takes all they send and answers nothing.
"""

import asyncio
import sys
import time
from collections import Counter
from contextlib import suppress

POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # and empty settings
PING = bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + bytes(8)
EVERY_S = 1.0
# What each sends first, and then again and again
KINDS = {
    "headers": (POST, b"x: y\r\n"),
    "bodies": (POST + b"authorization: Bearer wrong\r\ncontent-length: 1000000\r\n\r\n", b" " * 10),
    "reading": (b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n" * 20, b""),
    "idle": (b"", b""),
    "grpc": (PREFACE, PING),
}


async def hold(kind: str, host: str, port: int, until: float, seen: Counter[str]) -> None:
    first, again = KINDS[kind]
    while time.monotonic() < until:
        writer = None
        with suppress(OSError, asyncio.TimeoutError):
            opening = asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0), limit=1)
            reader, writer = await asyncio.wait_for(opening, 10)
            reader._transport.pause_reading()  # type: ignore[attr-defined]  # it reads nothing
            seen[f"{kind} opened"] += 1
            writer.write(first)
            while time.monotonic() < until and not writer.transport.is_closing():
                writer.write(again)
                await asyncio.wait_for(writer.drain(), 30)
                await asyncio.sleep(EVERY_S)
        if writer is not None:
            writer.transport.abort()
        await asyncio.sleep(0.1)


async def attack(port: int, grpc_port: int, each: int, seconds: float) -> None:
    until, seen = time.monotonic() + seconds, Counter[str]()
    async with asyncio.TaskGroup() as tasks:
        for number, kind in enumerate(KINDS):
            for index in range(each):
                to = grpc_port if kind == "grpc" else port
                tasks.create_task(hold(kind, f"127.0.0.{number + 2}", to, until, seen))
                if index % 20 == 0:
                    await asyncio.sleep(0.02)
    print(dict(seen), flush=True)


async def dummy(port: int, grpc_port: int) -> None:
    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while await reader.read(65536):
                pass
        writer.close()

    servers = [await asyncio.start_server(take, "127.0.0.1", each, backlog=2048) for each in (port, grpc_port)]
    print("ready", flush=True)
    await asyncio.gather(*(each.serve_forever() for each in servers))


if __name__ == "__main__":
    if sys.argv[1] == "dummy":
        asyncio.run(dummy(*map(int, sys.argv[2:])))
    else:
        asyncio.run(attack(*map(int, sys.argv[1:4]), float(sys.argv[4])))
