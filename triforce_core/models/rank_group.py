"""The group of ranks of tensor parallelism: processes of one machine that each hold a share of a model and of its KV
heads, and run its passes together.

Rank 0 leads: it is the tier. A Unix socket from it to each follower carries commands, and closes when either process
ends, so that none outlives the others. Tensors go through torch.distributed, by NCCL between GPUs and by gloo on CPUs.
docs/decisions/0014-pairs.md
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import shutil
import socket
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from triforce_core.errors import UnavailableError, require
from triforce_core.kv.shards import join
from triforce_core.kv.snapshot import Changes, Snapshot

log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 120.0  # for the followers to come to the rendezvous
# How far ranks may be apart, unless one of them hangs: while they load, and at most in a pass.
COLLECTIVE_TIMEOUT_S = 120.0
PASS_TIMEOUT_S, TOKEN_TIMEOUT_S = 10.0, 0.05  # in a pass, and more for each of its tokens
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a follower finds the rendezvous, and which rank it is there."""

    path: str  # of the leader's socket, in a folder that nobody else may enter
    rank: int
    world: int  # ranks in all


class Group(ABC):
    """One rank's end of the group; `connections` are to the followers, by rank, or to the leader alone.

    When another rank's process ends, this one does: without it no pass can be, and collectives that wait for it would
    hold up any gentler way. Whoever started the processes starts them anew.
    """

    def __init__(self, rank: int, world: int, connections: list[Connection]) -> None:
        self.rank, self.world, self.connections = rank, world, connections
        self.closing = False
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _watch(self) -> None:
        poller = select.poll()
        for connection in self.connections:
            poller.register(connection.fileno(), 0)  # of all that may happen, only that the other end is closed
        poller.poll()
        if not self.closing:
            level = logging.INFO if self.rank else logging.CRITICAL  # one of them reports it to the user
            log.log(level, "rank %d of %d ends: another rank has ended", self.rank, self.world)
            self.end()

    def abort(self, why: str) -> NoReturn:
        """End this process for an error, and with it the other ranks."""
        log.critical("rank %d of %d ends: %s", self.rank, self.world, why, exc_info=True)
        self.end()

    def end(self) -> NoReturn:
        logging.shutdown()
        os._exit(1)

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks have come this far, however long that takes: loading weights does."""

    def close(self) -> None:
        """Let go of the others."""
        self.closing = True
        for connection in self.connections:
            if not connection.closed:
                hang_up(connection)
        if dist.is_initialized():
            dist.destroy_process_group()


def hang_up(connection: Connection) -> None:
    """Close it so that the other end knows at once: `close` alone leaves it open while this end's watch waits on it."""
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end, suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    connection.close()


class Leader(Group):
    """Rank 0's end."""

    timeout_s = COLLECTIVE_TIMEOUT_S  # of what the ranks do together

    def expect(self, num_tokens: int) -> None:
        """From now on what the ranks do together belongs to a pass over so many tokens. When it takes too long, this
        end gives up, and all end.
        """
        self.timeout_s = pass_timeout_s(num_tokens)
        _set_pg_timeout(timedelta(seconds=self.timeout_s))

    def broadcast(self, command: object) -> None:
        """Every follower receives the commands in the order in which they were broadcast."""
        message = pickle.dumps(command)
        for connection in self.connections:
            connection.send_bytes(message)

    def barrier(self) -> None:
        """Raises what a follower could not do."""
        for connection in self.connections:
            if (failed := connection.recv()) is not None:
                raise failed
        self.broadcast("go on")

    def gather(self, part: Snapshot) -> Snapshot:
        """The whole of what all ranks cut, this one `part`."""
        parts = [part]
        for rank, connection in enumerate(self.connections, start=1):
            if not connection.poll(self.timeout_s):
                self.abort(f"rank {rank} hangs")
            parts.append(receive_contents(connection.recv(), rank, part.keys.device))
        return join(parts)

    def scatter(self, parts: list[Snapshot]) -> None:
        """Send each follower its part, by rank from 1 on; each must be at `accept`."""
        for rank, part in enumerate(parts, start=1):
            send_contents(part, rank)

    def stop(self) -> None:
        """Have the followers return, and let go of them."""
        self.closing = True
        self.broadcast(None)
        for connection in self.connections:
            connection.recv()
        self.close()


class Follower(Group):
    """The end of any other rank."""

    def receive(self) -> Any:
        """What the leader broadcasts next, waited for as long as it takes; None: there is no more."""
        try:
            command = pickle.loads(self.connections[0].recv_bytes())
        except (EOFError, ConnectionError):
            self.end()
        if command is None:
            self.closing = True
            self.connections[0].send(None)
        return command

    def barrier(self) -> None:
        self.connections[0].send(None)
        self.receive()

    def fail(self, error: Exception) -> NoReturn:
        """Have the leader's `barrier` raise this, and end when it lets go."""
        self.connections[0].send(error)
        threading.Event().wait()
        raise error

    def give(self, part: Snapshot) -> None:
        """To the leader's `gather`."""
        self.connections[0].send(outline(part))
        send_contents(part, 0)

    def accept(self, outlined: Snapshot, device: torch.device) -> Snapshot:
        """What the leader's `scatter` sends, of which this is the outline."""
        return receive_contents(outlined, 0, device)


class Rendezvous:
    """Where the followers of one leader find it, once: a group that comes together again has a new one."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.folder = Path(tempfile.mkdtemp(prefix="triforce-"))
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(self.folder / "ranks"))
        self.socket.listen()

    def endpoint(self, rank: int) -> Endpoint:
        return Endpoint(str(self.folder / "ranks"), rank, self.world)

    def lead(self, device: str, timeout_s: float = JOIN_TIMEOUT_S) -> Leader:
        """Wait for all followers. Raises `UnavailableError` where they do not come within `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        connections: dict[int, Connection] = {}
        try:
            while len(connections) < self.world - 1:
                self.socket.settimeout(max(0.001, until - time.monotonic()))
                accepted, _ = self.socket.accept()
                connection = Connection(accepted.detach())
                connections[connection.recv()] = connection
        except TimeoutError:
            came = f"{len(connections)} of {self.world - 1} other ranks came within {timeout_s:g} s"
            raise UnavailableError(f"tensor parallelism: only {came}") from None
        finally:
            self.socket.close()
            shutil.rmtree(self.folder)
        leader = Leader(0, self.world, [connections[rank] for rank in sorted(connections)])
        try:
            store = TCPStore(LOOPBACK, 0, self.world, is_master=True, wait_for_workers=False)
            leader.broadcast(store.port)
            start_collectives(store, leader, device)
        except Exception:
            leader.close()
            raise
        return leader


def follow_leader(endpoint: Endpoint, device: str) -> Follower:
    """Join the group at its rendezvous."""
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(endpoint.path)
    follower = Follower(endpoint.rank, endpoint.world, [Connection(connected.detach())])
    follower.connections[0].send(endpoint.rank)
    store = TCPStore(LOOPBACK, follower.receive(), endpoint.world, is_master=False)
    start_collectives(store, follower, device)
    return follower


def start_collectives(store: Store, group: Group, device: str) -> None:
    """The one process group of this process, as transformers wants it: over all ranks, each with a device."""
    on_gpu = device != "cpu"
    rule = "must be cuda with tensor_parallel where there are GPUs: transformers puts the shares there"
    require(on_gpu or not torch.cuda.is_available(), "device", device, rule)
    local = device_index(group.rank, group.world) if on_gpu else group.rank
    os.environ["LOCAL_RANK"] = str(local)  # read by transformers
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if on_gpu:
        torch.cuda.set_device(local)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=group.rank,
        world_size=group.world,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        device_id=torch.device("cuda", local) if on_gpu else None,
    )


def pass_timeout_s(num_tokens: int) -> float:
    """By gloo ranks wait for one another only, no longer in a long pass. By NCCL they wait for all that a GPU was given
    before, too.
    """
    return min(COLLECTIVE_TIMEOUT_S, PASS_TIMEOUT_S + TOKEN_TIMEOUT_S * num_tokens)


def device_index(rank: int, world: int) -> int:
    """Of the GPUs that this process sees, the rank's: its own where it sees all, the first where Ray gave it one."""
    seen = torch.cuda.device_count()
    require(seen in (1, world) or seen > world, "tensor_parallel", world, f"needs {world} GPUs: {seen} are here")
    return rank if seen >= world else 0


def outline(snapshot: Snapshot) -> Snapshot:
    """The snapshot without its contents."""
    return with_tensors(snapshot, [tensor.to("meta") for tensor in snapshot.tensors])


def send_contents(snapshot: Snapshot, rank: int) -> None:
    """The tensors alone; the outline goes another way."""
    for tensor in snapshot.tensors:
        if tensor.numel():
            dist.send(tensor.contiguous(), rank)


def receive_contents(outlined: Snapshot, rank: int, device: torch.device) -> Snapshot:
    """The snapshot with this outline, whose contents `rank` sends."""
    tensors = [torch.empty_like(tensor, device=device) for tensor in outlined.tensors]
    for tensor in tensors:
        if tensor.numel():
            dist.recv(tensor, rank)
    return with_tensors(outlined, tensors)


def with_tensors(snapshot: Snapshot, tensors: list[Tensor]) -> Snapshot:
    """With others in place of `snapshot.tensors`."""
    keys, values, *more = tensors
    changes = snapshot.changes and Changes(snapshot.changes.base, snapshot.changes.kept, *more)
    return replace(snapshot, keys=keys, values=values, changes=changes)
