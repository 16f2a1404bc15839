"""Vetting: grammars are compiled in a process of their own first, where time and memory can be bounded.

The library's limits do not bound every step: a multiple of a large prime, for example, takes minutes and gigabytes. So
each grammar is compiled in a process that the operating system ends at a limit. What passes is compiled again by the
tiers, with the same effort.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import resource
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from triforce_core.errors import InvalidValueError, TriForceError
from triforce_core.sampling.compiling import compiled

CPU_S = 2  # for one grammar
MEMORY_MIB = 256  # for one grammar
WALL_S = 30.0  # where other processes take the machine
AT_ONCE = 4
MAX_REASON = 500  # characters
KEPT = 4096  # verdicts
TOO_LARGE = f"takes more than {CPU_S} s or {MEMORY_MIB} MiB"


class Vetting:
    """Says which grammars can be compiled. All methods must run on one asyncio loop."""

    def __init__(self, load_tokenizer: Callable[[], Any], vocab_size: int) -> None:
        """`load_tokenizer` gives the model's transformers tokenizer; it is called when the process starts."""
        self.load_tokenizer, self.vocab_size = load_tokenizer, vocab_size
        self.verdicts: OrderedDict[bytes, asyncio.Future[str]] = OrderedDict()
        self.turns = asyncio.Semaphore(AT_ONCE)
        self.starting = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind("")  # Linux gives it a name that is no file, which would stay behind where this is killed
        self.listening.listen()
        self.address = os.fsdecode(self.listening.getsockname())

    async def error(self, grammar: str) -> str:
        """Why the grammar cannot be compiled; empty if it can. Raises what loading the tokenizer raises."""
        digest = hashlib.sha256(grammar.encode()).digest()
        if digest not in self.verdicts:
            self.verdicts[digest] = asyncio.ensure_future(self._verdict(grammar))
            if len(self.verdicts) > KEPT:
                self.verdicts.popitem(last=False)
        asked = self.verdicts[digest]
        try:
            return await asyncio.shield(asked)  # others may wait for the same verdict
        except (OSError, TriForceError):
            self.verdicts.pop(digest, None)  # perhaps it can be found later
            raise

    async def _verdict(self, grammar: str) -> str:
        async with self.turns:
            for _ in range(2):  # whatever ended a process, such as a lack of memory, may be over
                await asyncio.to_thread(self._start)
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(self.address)  # by hand, because uvloop knows no names but those of files
                reader, writer = await asyncio.open_unix_connection(sock=connection)
                try:
                    writer.write(grammar.encode())
                    writer.write_eof()
                    answer = await asyncio.wait_for(reader.read(), WALL_S)
                except TimeoutError:
                    answer = b""
                finally:
                    writer.close()
                if answer:
                    return str(json.loads(answer))
        return TOO_LARGE

    def _start(self) -> None:
        """Start the process, unless it runs."""
        with self.starting:
            if self.process is not None and self.process.poll() is None:
                return
            described = tokenizer_arguments(self.load_tokenizer(), self.vocab_size)
            listening = self.listening.fileno()
            command = [sys.executable, "-m", "triforce_core.sampling.vetting", str(listening)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listening])
            weakref.finalize(self, self.process.kill)
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:
                stdin.write(json.dumps(described).encode())


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """Compiles each grammar in a process of its own, for as long as the process that started it lives."""

    max_children = AT_ONCE

    def __init__(self, listening: int, tokenizer: LLTokenizer) -> None:
        super().__init__("", Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = socket.socket(fileno=listening)
        self.tokenizer, self.parent = tokenizer, os.getppid()

    def service_actions(self) -> None:
        super().service_actions()
        if os.getppid() != self.parent:
            sys.exit()


class Handler(socketserver.StreamRequestHandler):
    """Reads a grammar, and answers why it cannot be compiled."""

    server: Server

    def handle(self) -> None:
        _, user, _ = struct.unpack("3i", self.request.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():  # any user of the machine can connect
            return
        grammar = self.rfile.read().decode()
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = held + (MEMORY_MIB << 20)
        for limit, value in (resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, most):
            resource.setrlimit(limit, (value, value))
        os.nice(10)  # the tiers may need this machine's cores
        reason = compiled(self.server.tokenizer, grammar).get_error()
        self.wfile.write(json.dumps(reason[:MAX_REASON]).encode())


def tokenizer_arguments(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """The arguments of llguidance's tokenizer. Raises `InvalidValueError` for one that it cannot use."""
    if not tokenizer.is_fast:
        raise InvalidValueError("grammar", type(tokenizer).__name__, "needs a fast tokenizer, which this model lacks")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    # A tokenizer may know fewer tokens than the model, or more.
    n_vocab = max(vocab_size, len(tokenizer))
    return {"tokenizer": backend.to_str(), "n_vocab": n_vocab, "eos_token": tokenizer.eos_token_id}


if __name__ == "__main__":
    Server(int(sys.argv[1]), LLTokenizer(**json.load(sys.stdin))).serve_forever()
