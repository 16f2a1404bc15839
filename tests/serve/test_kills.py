"""A target or a replica that is killed at any moment of a stream: its reader gets what an undisturbed one gets."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.conftest import HeldOut
from tests.serve import mortals
from tests.serve.conftest import Server
from tests.serve.mortals import REFRESH_EVERY, every_kind, mortal, process_of, target_status, together, wait_idle
from tests.starting import LocalRay

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPT_TOKENS, MAX_TOKENS = 1500, 120
# Tokens after which the first stream's victim is killed, and the seconds between. Rounds last milliseconds, so the
# moments of draft and verify differ by half a round at most.
MOMENTS = {
    "prefill": (0, 0.15),
    "hand-over": (1, 0.0),
    "draft": (16, 0.0),
    "verify": (16, 0.01),
    "refresh": (1 + REFRESH_EVERY, 0.0),
}
BACK_OFF_S = 2.0  # most seconds after which the gateway asks again
BUSY_S = 5.0  # allowance for processes that wait for a core while others load


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, local_ray: LocalRay) -> Iterator[Server]:
    local_ray.end()
    with mortal(tmp_path_factory.mktemp("kills")) as server:
        yield server


class Killer:
    """Kills a process once the first stream has come to a moment, and notes how long the target is away."""

    def __init__(self, server: Server, victim: str, moment: str, with_signal: signal.Signals) -> None:
        self.server, self.victim, self.signal = server, victim, with_signal
        self.tokens, self.delay_s = MOMENTS[moment]
        self.reached = threading.Event()
        self.restart_s = 0.0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        if not self.tokens:
            self.reached.set()

    def watch(self, count: int) -> None:
        if count >= self.tokens:
            self.reached.set()

    def _run(self) -> None:
        before = process_of(self.server, "target")
        self.reached.wait(300)
        time.sleep(self.delay_s)
        began = time.monotonic()
        assert mortals.send(self.server, self.victim, self.signal)

        def back() -> bool:
            status, now = target_status(self.server), process_of(self.server, "target")
            return status is not None and status["ready"] and now is not None and now != before

        mortals.wait_until(back, "no target comes back")
        self.restart_s = time.monotonic() - began


def survived(
    server: Server, prompt: tuple[int, ...], temperature: float, victim: str, moment: str, with_signal: signal.Signals
) -> None:
    asked = every_kind(list(prompt), temperature, MAX_TOKENS)
    expected = together(server, asked)
    drafting = [process_of(server, tier) for tier in ("retrieval", "draft")]
    killer = Killer(server, victim, moment, with_signal)
    found = together(server, asked, killer.watch)
    killer.thread.join(300)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.equals(other), f"stream {index}: {one.law()} is not {other.law()}"
    # Those that were in the pass take turns, so the gap that must be short is that of the one that goes first.
    gap, prefill = min(each.gap_s for each in found), max(each.first_s for each in expected)
    print(f"{victim} {moment} T={temperature} {with_signal.name}: away {killer.restart_s:.1f} s, gap {gap:.1f} s")
    assert gap <= killer.restart_s + prefill + BACK_OFF_S + BUSY_S
    if victim == "target":
        assert drafting == [process_of(server, tier) for tier in ("retrieval", "draft")], "they are the same processes"
    wait_idle(server)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", ["target", "replica"])
def test_streams_end_as_if_nothing_had_been_killed(
    server: Server, held_out: HeldOut, victim: str, moment: str, temperature: float
) -> None:
    survived(server, held_out("inspect.py", PROMPT_TOKENS), temperature, victim, moment, signal.SIGKILL)


def test_a_stopped_target_is_found_out(server: Server, held_out: HeldOut) -> None:
    survived(server, held_out("inspect.py", PROMPT_TOKENS), 0.8, "target", "verify", signal.SIGSTOP)
