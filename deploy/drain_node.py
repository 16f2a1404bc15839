"""What a pod of the chart runs before it ends: `python -m deploy.drain_node SECONDS`.

Ray is asked to drain this node: Serve sends no new requests to its replicas, starts others elsewhere if there is room,
and lets requests here finish. This returns when no replica is left and no request passes through this pod's HAProxy,
or after that many seconds. If Ray cannot be asked, it waits all the same.
"""

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

REPLICA = "ray::ServeReplica"  # how the process title of a Serve replica begins
CHECK_EVERY_S = 0.5


def drain_node(seconds: int) -> None:
    # Serve stops replicas gracefully once no more time than their shutdown timeout is left before the deadline.
    command = ["ray", "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod ends"]
    subprocess.run([*command, "--deadline-remaining-seconds", str(seconds)], check=False)


def busy() -> bool:
    """Whether this pod has a replica or passes on a request. Only the pod's own processes can be seen here."""
    return any(is_replica(each) or any(requests_of(each)) for each in psutil.process_iter(["name", "cmdline"]))


def is_replica(process: psutil.Process) -> bool:
    return "".join(process.info["cmdline"] or ()).startswith(REPLICA)


def requests_of(process: psutil.Process) -> Iterator[int]:
    """The local ports from which a HAProxy has called replicas; its clients' connections end where it listens."""
    if process.info["name"] != "haproxy":
        return
    try:
        found = process.net_connections("tcp")
    except psutil.Error:  # it has ended meanwhile
        return
    listening = {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}
    yield from (
        each.laddr.port for each in found if each.status == psutil.CONN_ESTABLISHED and each.laddr.port not in listening
    )


def main() -> None:
    seconds = int(sys.argv[1])
    until = time.monotonic() + seconds
    drain_node(seconds)
    while busy() and time.monotonic() < until:
        time.sleep(CHECK_EVERY_S)


if __name__ == "__main__":
    main()
