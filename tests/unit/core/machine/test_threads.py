"""The CPU threads of passes: found by the times of the passes themselves."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from triforce_core.building.inspection import runners_of
from triforce_core.building.loading import load_local_engine
from triforce_core.config import load_settings
from triforce_core.kv.base import Forward
from triforce_core.machine.cpu import usable_cores
from triforce_core.machine.threads import SETTLED, SOON, Threads, apart, run_on, threads_for
from triforce_core.messages import GREEDY, SequenceSpec, Span, Tier

Milliseconds = Callable[[int], float]  # of a pass with this number of threads


def run(
    threads: Threads, passes: int, ms: Milliseconds, noise: float = 0.0, tokens: int = 1, keys: int = 8000
) -> list[int]:
    """The threads of these passes, one after another. A share `noise` of the times is added or taken away."""
    rng, used = random.Random(7), []
    for _ in range(passes):
        used.append(threads.of(tokens, keys))
        threads.took(ms(used[-1]) * rng.uniform(1 - noise, 1 + noise) / 1e3)
    return used


@pytest.mark.parametrize(
    ("most", "ms", "best"),
    [
        (2, {1: 27, 2: 17}, 2),
        (2, {1: 14, 2: 22}, 1),
        (2, {1: 20, 2: 19}, 1),
        (12, {12: 4, 6: 8, 3: 16, 1: 48}, 12),
        (12, {12: 38, 6: 39, 3: 41, 1: 80}, 3),
        (8, {8: 40, 4: 20, 2: 14, 1: 10}, 1),
        (1, {1: 10}, 1),
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.04])
def test_more_threads_are_taken_where_they_pay_and_fewer_in_a_tie(
    most: int, ms: dict[int, float], best: int, noise: float
) -> None:
    used = run(Threads(most), 200, ms.__getitem__, noise)
    assert used[0] == most
    assert used[100:] == [best] * 100


def test_half_and_twice_are_tried_again_after_a_while() -> None:
    threads = Threads(8)
    run(threads, 100, {8: 80, 4: 40, 2: 20, 1: 25}.__getitem__)
    assert threads.latest == 2
    used = run(threads, 2 * SETTLED, {8: 5, 4: 10, 2: 20, 1: 40}.__getitem__)
    assert used[: SOON // 2] == [2] * (SOON // 2)
    assert used[-1] == 8
    assert 1 in used


def test_a_number_that_was_found_while_others_had_the_cores_is_corrected_soon() -> None:
    threads = Threads(2)
    run(threads, 100, {1: 20, 2: 19}.__getitem__)
    assert threads.latest == 1
    used = run(threads, SETTLED, {1: 20, 2: 11}.__getitem__)  # a pass on one thread takes what it took
    assert used[SOON + 50 :] == [2] * (SETTLED - SOON - 50)


def test_both_are_tried_again_soon_where_passes_become_slower() -> None:
    threads = Threads(2)
    run(threads, 100, {1: 20, 2: 19}.__getitem__)
    assert threads.latest == 1
    assert run(threads, 100, {1: 40, 2: 22}.__getitem__)[-1] == 2
    assert 1 not in run(threads, SOON // 2, {1: 50, 2: 28}.__getitem__), "a little slower is no change"


def test_few_passes_run_on_what_is_not_best() -> None:
    used = run(Threads(2), 20 * SETTLED, {1: 27, 2: 17}.__getitem__)
    assert 0 < used.count(1) <= 0.01 * len(used)


def test_a_disturbed_pass_decides_nothing() -> None:
    times = iter([0.5, 17, 17, 400, 17, 27, 27, 27, 17, 17, 17, 17, 27, 27, 27, 27])
    threads = Threads(2)
    run(threads, 16, lambda _: next(times))
    assert threads.of(1, 8000) == 2


def test_each_size_of_pass_has_a_number_of_its_own() -> None:
    threads = Threads(2)
    run(threads, 50, {1: 10, 2: 12}.__getitem__, tokens=1)
    run(threads, 50, {1: 40, 2: 22}.__getitem__, tokens=9)
    run(threads, 50, {1: 12, 2: 6}.__getitem__, tokens=1, keys=100)
    assert [threads.of(n, 8000) for n in (1, 8, 15, 64, 4000)] == [1, 2, 2, 2, 2]
    assert threads.of(1, 100) == 2
    assert threads.of(1, 5000) == threads.latest == 1


def test_long_passes_use_all_and_are_not_timed() -> None:
    threads = Threads(4)
    assert run(threads, 100, lambda _: 1.0, tokens=64) == [4] * 100
    assert threads.of(1, 8000) == 4


def test_a_new_size_begins_with_the_number_of_the_pass_before() -> None:
    threads = Threads(64)
    run(threads, 200, lambda n: 100 + n)
    assert threads.of(1, 8000) == 1
    assert threads.of(9, 8000) <= 2
    assert run(threads, 200, lambda n: 100 / n, tokens=9)[-1] == 64


def test_threads_that_are_set_stay() -> None:
    assert run(Threads(4, chosen=False), 100, {4: 100, 2: 1, 1: 1}.__getitem__) == [4] * 100


@pytest.mark.parametrize(
    ("settings", "chooses"),
    [
        ({}, True),
        ({"threads": 1}, False),
        ({"device": "cuda"}, False),
        ({"target": {"tensor_parallel": 2}}, False),
        ({"deterministic": True}, False),
        ({"compile": "on"}, False),
    ],
    ids=str,
)
def test_threads_are_chosen_unless_something_fixes_them(settings: dict[str, object], chooses: bool) -> None:
    assert load_settings(**settings).chooses_threads is chooses


def test_each_pass_has_its_own_threads_whatever_ran_before() -> None:
    settings = load_settings(
        dtype="float32", max_sequences=1, target={"context_length": 512, "prefill_chunk": 128}, threads=3
    )
    runner = runners_of(load_local_engine(settings))[Tier.TARGET]
    assert runner.threads is not None
    assert runner.threads.most == 3
    runner.threads = Threads(2)
    seen: list[int] = []
    runner.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    spec = SequenceSpec(GREEDY, 0, 300, 400)
    before = torch.get_num_threads()
    try:
        for stop in range(100, 120):
            run_on(5)  # another runner's
            runner.forward([Forward(Span(1, 0, tuple(range(stop)), spec), 1)])
            assert torch.get_num_threads() == runner.threads.latest, "what follows a pass is small work"
        assert seen[:6] == [2, 2, 2, 2, 2, 1], "the long pass; one that is not counted and three with two threads"
    finally:
        torch.set_num_threads(before)


COUNTED = """
import os, time, torch
from triforce_core.machine.threads import apart, run_on

def threads():
    return len(os.listdir("/proc/self/task"))

def added():
    run_on(3)
    torch.ones(10**7).exp()
    return threads()

run_on(3)  # PyTorch makes threads of another pool, which stay
before = threads()
during, until = apart(added), time.monotonic() + 10
while threads() > before and time.monotonic() < until:
    time.sleep(0.01)
print(during - before, threads() - before, added() - before)
"""


def test_what_runs_apart_leaves_no_threads() -> None:
    """OpenMP's stay with the thread that they helped, and with more threads than cores all of them sleep at once."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run([sys.executable, "-c", COUNTED], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "0", "2"], "a thread and two helpers, none afterwards, those of this thread"
    with pytest.raises(ZeroDivisionError):
        apart(lambda: 1 / 0)


def test_openmp_s_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sets OMP_NUM_THREADS to one in its workers, so that says nothing."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("OMP_THREAD_LIMIT")
    cores = len(os.sched_getaffinity(0))
    assert threads_for(load_settings()).most == min(cores, usable_cores())
    monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
    assert usable_cores() == threads_for(load_settings()).most == 1


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("what", None), (None, None)]
)
def test_a_container_s_limit_counts_as_its_cores(tmp_path: Path, quota: str | None, cores: int | None) -> None:
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota + "\n")
    assert usable_cores(file) == (cores or usable_cores(tmp_path / "none"))
