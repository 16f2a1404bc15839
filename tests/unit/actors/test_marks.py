"""What a target was working on can be read after its death."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from actors.marks import NUM_SLOTS, Marks
from actors.running_target import TargetProcess


def test_marks_outlive_the_process_that_set_them() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        marks = Marks.create()
        marks.put([3, 4, NUM_SLOTS + 7])
        marks.take_off([4])
        os.write(writing, marks.path.encode())
        time.sleep(60)
        os._exit(0)
    process = TargetProcess.of(child)
    try:
        marks = Marks.of(os.read(reading, 100).decode())
        assert not process.dead
    finally:
        process.kill()
    until = time.monotonic() + 10
    while not process.dead:  # it is not waited for: a dead one is known as dead all the same
        assert time.monotonic() < until
        time.sleep(0.01)
    assert [slot for slot in range(10) if marks.has(slot)] == [3, 7]
    assert marks.any()
    marks.take_off([3, 7])
    assert not marks.any()
    marks.close()
    assert not marks.any()
    os.dup2(reading, marks.fd)  # the number goes to another file
    marks.close()
    os.close(marks.fd)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(reading)
    os.close(writing)


def test_the_followers_of_a_target_end_with_it_even_if_they_hang() -> None:
    leader, follower = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    follower.send_signal(signal.SIGSTOP)
    process = TargetProcess.of(leader.pid, [follower.pid, 1_000_000_000])
    process.kill()
    assert [each.wait(10) for each in (leader, follower)] == [-signal.SIGKILL] * 2


def test_a_process_that_is_gone_has_no_marks() -> None:
    with pytest.raises(OSError, match="No such file"):
        Marks.of("/proc/1000000000/fd/3")
    assert not TargetProcess.of(1_000_000_000).dead, "it was never seen"
