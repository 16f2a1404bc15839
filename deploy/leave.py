"""What a pod of the chart runs before it ends: `python -m deploy.leave SECONDS`.

Ray is asked to drain this node: Serve sends no new requests to its replicas, starts others elsewhere if there is room,
and lets requests here finish. This returns when no replica is left, or after that many seconds.
"""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

REPLICA = "ray::ServeReplica"  # how the process title of a Serve replica begins
CHECK_EVERY_S = 0.5


def drain_node(seconds: int) -> None:
    # Serve stops replicas gracefully once no more time than their shutdown timeout is left before the deadline.
    command = ["ray", "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod ends"]
    subprocess.run([*command, "--deadline-remaining-seconds", str(seconds)], check=True)


def replicas_here() -> list[int]:
    """The pids of this node's Serve replicas; a pod sees its own processes only."""
    titles = {each.pid: "".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])}
    return [pid for pid, title in titles.items() if title.startswith(REPLICA)]


def main() -> None:
    seconds = int(sys.argv[1])
    until = time.monotonic() + seconds
    drain_node(seconds)
    while replicas_here() and time.monotonic() < until:
        time.sleep(CHECK_EVERY_S)


if __name__ == "__main__":
    main()
