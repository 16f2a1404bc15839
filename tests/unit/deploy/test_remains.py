"""A process leaves nothing behind that it has started, whether it ends properly or is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from deploy import remains

STARTS_SOME = """
import subprocess, sys, time
from deploy.remains import nothing_remains
with nothing_remains():
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])"
    subprocess.Popen([sys.executable, "-c", child + "; time.sleep(300)"], start_new_session=True)
    time.sleep(0.5)
    print("started", flush=True)
    time.sleep({seconds})
"""


@pytest.mark.parametrize("killed", [True, False])
def test_what_a_server_has_started_ends_with_it(killed: bool) -> None:
    program = STARTS_SOME.replace("{seconds}", "300" if killed else "3")
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "started\n"
        [mark] = {each.environ()[remains.MARK] for each in psutil.Process(server.pid).children()[:1]} or {""}
        started = remains.marked(mark)
        assert len(started) >= 2
        if killed:
            server.send_signal(signal.SIGKILL)
        server.wait(30)
    until = time.monotonic() + (remains.GRACE_S + remains.PATIENCE_S if killed else 0)
    while left := remains.marked(mark):
        assert time.monotonic() < until, left
        time.sleep(0.1)
