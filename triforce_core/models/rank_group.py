"""The ranks of tensor parallelism: processes on one machine that each hold a share of a model and of its KV heads, and
run its passes together. docs/decisions/0014-pairs.md

Rank 0 leads. A Unix socket to each follower carries commands and closes when either process ends, so no rank outlives
the others. Tensors go through torch.distributed, by NCCL between GPUs and by gloo on CPUs.
"""

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

JOIN_TIMEOUT_S = 120.0  # for all followers to arrive at the rendezvous
# If a collective waits for a rank longer than this, the rank counts as hung. Collectives of a pass have shorter limits,
# up to this one; barriers have no limit.
COLLECTIVE_TIMEOUT_S = 120.0
PASS_TIMEOUT_S, TOKEN_TIMEOUT_S = 10.0, 0.05  # per pass, and in addition per token of it
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address of the rendezvous, and the rank of the follower that goes there."""

    path: str  # of the leader's socket, in a folder that only this user may enter
    rank: int
    world: int  # ranks in all


class Group(ABC):
    """One rank's end of the group. `connections` are the leader's to its followers, by rank, or a follower's to the
    leader.

    When another rank's process ends, this process ends at once: no pass is possible without that rank, and a collective
    that waits for it would block any orderly shutdown. The parent or supervisor must start the processes again.
    """

    def __init__(self, rank: int, world: int, connections: list[Connection]) -> None:
        self.rank, self.world, self.connections = rank, world, connections
        self.closing = False
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _watch(self) -> None:
        poller = select.poll()
        for connection in self.connections:
            poller.register(connection.fileno(), 0)  # no events but the end of the connection
        poller.poll()
        if not self.closing:
            level = logging.INFO if self.rank else logging.CRITICAL  # only the leader reports it to the user
            log.log(level, "rank %d of %d ends: another rank has ended", self.rank, self.world)
            self.end()

    def abort(self, why: str) -> NoReturn:
        """End this process because of an error, and with it the other ranks."""
        log.critical("rank %d of %d ends: %s", self.rank, self.world, why, exc_info=True)
        self.end()

    def end(self) -> NoReturn:
        logging.shutdown()
        os._exit(1)

    @abstractmethod
    def least(self, number: int) -> int:
        """The least of all ranks' numbers. Waits for them without a time limit, because loading weights may take long.
        The leader raises the error with which a follower called `fail`.
        """

    def barrier(self) -> None:
        """Wait until all ranks have reached this point; see `least`."""
        self.least(0)

    def close(self) -> None:
        """Close the connections to the other ranks and the process group."""
        self.closing = True
        for connection in self.connections:
            if not connection.closed:
                hang_up(connection)
        if dist.is_initialized():
            dist.destroy_process_group()


def hang_up(connection: Connection) -> None:
    """Close the connection so that the other end notices at once, even while the `_watch` thread polls it."""
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end, suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    connection.close()


class Leader(Group):
    """The group as rank 0 sees it."""

    timeout_s = COLLECTIVE_TIMEOUT_S  # for the next collective or gather
    pids: tuple[int, ...] = ()  # the followers' process ids, by rank

    def expect(self, num_tokens: int) -> None:
        """Set the timeout for a pass over `num_tokens` tokens. If it runs out, the leader ends, and all ranks."""
        self.timeout_s = pass_timeout_s(num_tokens)
        _set_pg_timeout(timedelta(seconds=self.timeout_s))

    def broadcast(self, command: object) -> None:
        """Send a command to every follower; commands arrive in the order in which they were broadcast."""
        message = pickle.dumps(command)
        for connection in self.connections:
            connection.send_bytes(message)

    def least(self, number: int) -> int:
        for connection in self.connections:
            given = connection.recv()
            if isinstance(given, Exception):
                raise given
            number = min(number, given)
        self.broadcast(number)
        return number

    def gather(self, part: Snapshot) -> Snapshot:
        """The whole snapshot, joined from the parts of all ranks; `part` is the leader's."""
        parts = [part]
        for rank, connection in enumerate(self.connections, start=1):
            if not connection.poll(self.timeout_s):
                self.abort(f"rank {rank} hangs")
            parts.append(receive_contents(connection.recv(), rank, part.keys.device))
        return join(parts)

    def scatter(self, parts: list[Snapshot]) -> None:
        """Send each follower its part; `parts` begins with the part of rank 1. Each follower must call `accept`."""
        for rank, part in enumerate(parts, start=1):
            send_contents(part, rank)

    def stop(self) -> None:
        """Make the followers' `receive` return None, wait for their answers, and close the group."""
        self.closing = True
        self.broadcast(None)
        for connection in self.connections:
            connection.recv()
        self.close()


class Follower(Group):
    """The group as any other rank sees it."""

    def receive(self) -> Any:
        """The leader's next command, without a time limit; None when the leader stops."""
        try:
            command = pickle.loads(self.connections[0].recv_bytes())
        except (EOFError, ConnectionError):
            self.end()
        if command is None:
            self.closing = True
            self.connections[0].send(None)
        return command

    def least(self, number: int) -> int:
        self.connections[0].send(number)
        return int(self.receive())

    def fail(self, error: Exception) -> NoReturn:
        """Make the leader's `least` or `barrier` raise `error`, then wait until the leader closes the group."""
        self.connections[0].send(error)
        threading.Event().wait()
        raise error

    def give(self, part: Snapshot) -> None:
        """Send this rank's part of a snapshot to the leader's `gather`."""
        self.connections[0].send(outline(part))
        send_contents(part, 0)

    def accept(self, outlined: Snapshot, device: torch.device) -> Snapshot:
        """The part of a snapshot that the leader's `scatter` sends; `outlined` is its outline."""
        return receive_contents(outlined, 0, device)


class Rendezvous:
    """The place where followers connect to their leader. It serves once: each new group needs a new rendezvous."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.folder = Path(tempfile.mkdtemp(prefix="triforce-"))
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(self.folder / "ranks"))
        self.socket.listen()

    def endpoint(self, rank: int) -> Endpoint:
        return Endpoint(str(self.folder / "ranks"), rank, self.world)

    def lead(self, device: str, timeout_s: float = JOIN_TIMEOUT_S) -> Leader:
        """Wait for all followers. Raises `UnavailableError` if they do not arrive within `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        connections: dict[int, Connection] = {}
        pids: dict[int, int] = {}
        try:
            while len(connections) < self.world - 1:
                self.socket.settimeout(max(0.001, until - time.monotonic()))
                accepted, _ = self.socket.accept()
                connection = Connection(accepted.detach())
                rank, pids[rank] = connection.recv()
                connections[rank] = connection
        except TimeoutError:
            came = f"{len(connections)} of {self.world - 1} other ranks came within {timeout_s:g} s"
            raise UnavailableError(f"tensor parallelism: only {came}") from None
        finally:
            self.socket.close()
            shutil.rmtree(self.folder)
        leader = Leader(0, self.world, [connections[rank] for rank in sorted(connections)])
        leader.pids = tuple(pids[rank] for rank in sorted(pids))
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
    follower.connections[0].send((endpoint.rank, os.getpid()))
    store = TCPStore(LOOPBACK, follower.receive(), endpoint.world, is_master=False)
    start_collectives(store, follower, device)
    return follower


def start_collectives(store: Store, group: Group, device: str) -> None:
    """Start the process's only torch.distributed group, over all ranks, each with its device, as transformers needs it.

    Raises `InvalidValueError` for a device setting that transformers would not follow, or too few GPUs.
    """
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
    """Timeout of the collectives of a pass, in seconds. It grows with the tokens because NCCL also waits for all
    earlier work of the GPU; with gloo, ranks wait only for each other.
    """
    return min(COLLECTIVE_TIMEOUT_S, PASS_TIMEOUT_S + TOKEN_TIMEOUT_S * num_tokens)


def device_index(rank: int, world: int) -> int:
    """Index of the rank's GPU among those that the process sees: the rank itself if it sees enough GPUs, 0 if Ray
    assigned it one. Raises `InvalidValueError` for other numbers of GPUs.
    """
    seen = torch.cuda.device_count()
    require(seen in (1, world) or seen > world, "tensor_parallel", world, f"needs {world} GPUs: {seen} are here")
    return rank if seen >= world else 0


def outline(snapshot: Snapshot) -> Snapshot:
    """The snapshot with meta tensors: shapes and dtypes without contents."""
    return with_tensors(snapshot, [tensor.to("meta") for tensor in snapshot.tensors])


def send_contents(snapshot: Snapshot, rank: int) -> None:
    """Send the snapshot's tensors to `rank`; the outline is sent over the socket."""
    for tensor in snapshot.tensors:
        if tensor.numel():
            dist.send(tensor.contiguous(), rank)


def receive_contents(outlined: Snapshot, rank: int, device: torch.device) -> Snapshot:
    """The snapshot with this outline and the contents that `rank` sends, on `device`."""
    tensors = [torch.empty_like(tensor, device=device) for tensor in outlined.tensors]
    for tensor in tensors:
        if tensor.numel():
            dist.recv(tensor, rank)
    return with_tensors(outlined, tensors)


def with_tensors(snapshot: Snapshot, tensors: list[Tensor]) -> Snapshot:
    """A copy of the snapshot with `tensors` in place of `snapshot.tensors`."""
    keys, values, *more = tensors
    changes = snapshot.changes and Changes(snapshot.changes.base, snapshot.changes.kept, *more)
    return replace(snapshot, keys=keys, values=values, changes=changes)
